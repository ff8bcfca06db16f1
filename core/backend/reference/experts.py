"""Reference of the mixture of experts: routing, the experts' products, and the way to and from other ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from core.backend.layout import torch_dtype
from core.backend.ops.dense import Act
from core.backend.ops.experts import (
    CombineArgs,
    CombineOp,
    DispatchArgs,
    DispatchOp,
    ExpertsArgs,
    ExpertsOp,
    RouteArgs,
    RouteOp,
)
from core.backend.reference.dense import activate, int8_product, plain, product
from core.backend.reference.precision import row_by_row, wide
from core.backend.reference.registry import composite
from core.backend.weights import Packed, Quantized

__all__ = ["largest", "one_expert"]


def largest(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dim, falling; of equals the lower index first."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@composite("route")
def make_route(op: RouteOp) -> Callable[[RouteArgs], tuple[Tensor, Tensor]]:
    """Weights and ids of each token's experts."""

    def route(args: RouteArgs) -> tuple[Tensor, Tensor]:
        scores = row_by_row(op, lambda rows: _scores(op, rows), args.router_logits.to(wide(op)))
        choice = scores if args.bias is None else scores + args.bias.to(scores.dtype)
        ids = largest(_within_groups(op, choice), op.top_k)
        weights = scores.gather(-1, ids)
        if op.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return (weights * op.scaling).to(torch.float32), ids.to(torch.int32)

    return route


def _scores(op: RouteOp, logits: Tensor) -> Tensor:
    return logits.softmax(-1) if op.scoring == "softmax" else logits.sigmoid()


def _within_groups(op: RouteOp, choice: Tensor) -> Tensor:
    """Scores with -inf for the experts of groups that do not stay."""
    if op.num_groups == 1 or op.top_k_groups == op.num_groups:
        return choice
    groups = choice.unflatten(-1, (op.num_groups, -1))
    best = groups.topk(min(2 if op.has("bias") else 1, groups.shape[-1]), dim=-1).values.sum(-1)
    stays = torch.zeros_like(best, dtype=torch.bool).scatter(-1, largest(best, op.top_k_groups), True)
    return torch.where(stays.unsqueeze(-1), groups, -torch.inf).flatten(-2)


@composite("experts")
def make_experts(op: ExpertsOp) -> Callable[[ExpertsArgs], Tensor]:
    """Expert by expert over the tokens that chose it; a token's sum runs over its experts in rising order."""

    def experts(args: ExpertsArgs) -> Tensor:
        out = torch.zeros(args.expert_ids.shape[0], op.hidden_size, dtype=wide(op), device=args.expert_ids.device)
        for expert in range(op.num_experts):
            rows, column = torch.where(args.expert_ids == expert + op.first_expert)
            if len(rows):
                weights = args.weights[rows, column].to(out.dtype)
                out.index_add_(0, rows, _expert(op, args, expert, rows) * weights[:, None])
        return out.to(torch_dtype(op.dtype))

    return experts


def _expert(op: ExpertsOp, args: ExpertsArgs, expert: int, rows: Tensor) -> Tensor:
    x: Act
    if isinstance(args.x, Quantized):
        x = Quantized(q=args.x.q[rows], scale=args.x.scale[rows], format=args.x.format)
    else:
        x = args.x[rows]
    both = _project(op, x, one_expert(args.gate_up, expert))
    gate = row_by_row(op, lambda part: activate(part, op.activation), both[:, : op.intermediate_size])
    hidden = gate * both[:, op.intermediate_size :]
    return _project(op, hidden, one_expert(args.down, expert))


def _project(op: ExpertsOp, x: Act, weight: Packed) -> Tensor:
    if op.scheme == "int8":
        return int8_product(op, x, weight)
    return product(op, plain(x, wide(op)), weight.dense().to(wide(op)))


def one_expert(weight: Packed, expert: int) -> Packed:
    """One expert's weight [N, K] of a Packed [experts, N, K], as views."""
    if type(weight).dense is not Packed.dense:
        return Packed(shape=weight.shape[1:], scheme="none", tensors={"weight": weight.dense()[expert]})
    parts = {name: part[expert] for name, part in weight.tensors().items()}
    return Packed(shape=weight.shape[1:], scheme=weight.scheme, tensors=parts)


@composite("dispatch")
def make_dispatch(op: DispatchOp) -> Callable[[DispatchArgs], tuple[Tensor, Tensor, Tensor]]:
    """Everyone's tokens, padded to the capacity, in rank order: all ranks see all tokens."""

    def dispatch(args: DispatchArgs) -> tuple[Tensor, Tensor, Tensor]:
        missing = op.capacity - len(args.x)
        assert missing >= 0, f"{len(args.x)} tokens do not fit a capacity of {op.capacity}"
        x, weights = (F.pad(part, (0, 0, 0, missing)) for part in (args.x, args.weights))
        ids = F.pad(args.expert_ids, (0, 0, 0, missing), value=-1)
        return args.comm.all_gather(x), args.comm.all_gather(weights), args.comm.all_gather(ids)

    return dispatch


@composite("combine")
def make_combine(op: CombineOp) -> Callable[[CombineArgs], Tensor]:
    """This rank's rows of the sum over the ranks, padding cut off."""

    def combine(args: CombineArgs) -> Tensor:
        return args.comm.reduce_scatter(args.x)[: args.num_tokens]

    return combine
