"""Mixture of experts: choosing them, and their products as grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import Quantized, torch_dtype
from core.backend.ops import ExpertsArgs, ExpertsOp, RouteArgs, RouteOp
from core_ascend.ops.dense import make_gate
from core_ascend.ops.linear import quantized_rows
from core_ascend.vendor import npu
from core_ascend.weights import AscendPacked

__all__ = ["experts", "route"]

_COUNTS = 1
"""Group list of `npu_moe_init_routing_v2` and `npu_grouped_matmul`: tokens of each expert, not their running sum."""
_BY_ROWS = 0
_ONE_RESULT = 2
_UNQUANTIZED = -1
_BEST, _BEST_TWO = 0, 1
_SOFTMAX, _SIGMOID = 0, 1


def route(op: RouteOp) -> Callable[[RouteArgs], tuple[Tensor, Tensor]]:
    """`npu_moe_gating_top_k`, or its plain form for a softmax without bias and groups."""
    vendor = npu()
    plain = op.scoring == "softmax" and not op.has("bias") and op.num_groups == 1

    def run(args: RouteArgs) -> tuple[Tensor, Tensor]:
        logits = args.router_logits.float()
        if plain:
            weights, ids, _ = vendor.npu_moe_gating_top_k_softmax(logits, None, op.top_k)
        else:
            _, ids, _ = vendor.npu_moe_gating_top_k(
                logits,
                op.top_k,
                bias=None if args.bias is None else args.bias.float(),
                k_group=op.top_k_groups,
                group_count=op.num_groups,
                group_select_mode=_BEST_TWO if op.has("bias") else _BEST,
                renorm=0,
                norm_type=_SIGMOID if op.scoring == "sigmoid" else _SOFTMAX,
            )
            # The call divides sigmoid weights by their sum, asked or not, and softmax weights never: weigh here.
            scores = logits.sigmoid() if op.scoring == "sigmoid" else logits.softmax(-1)
            weights = scores.gather(-1, ids.long())
        if op.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return weights * op.scaling, ids

    return run


def experts(op: ExpertsOp) -> Callable[[ExpertsArgs], Tensor]:
    """Tokens sorted by expert, two grouped products with the gate between, and the weighted sum back in order."""
    vendor, dtype = npu(), torch_dtype(op.dtype)
    product = _int8_product(dtype) if op.scheme == "int8" else _dense_product()
    gate = make_gate(op.activation)

    def run(args: ExpertsArgs) -> Tensor:
        assert isinstance(args.gate_up, AscendPacked) and isinstance(args.down, AscendPacked)
        x, scale = _rows(args.x, quantize=op.scheme == "int8")
        if not len(x):
            return torch.zeros(0, op.hidden_size, dtype=dtype, device=x.device)
        local = args.expert_ids - op.first_expert
        # An expert behind the last one takes what belongs to other ranks, and is in no range.
        mine = (local >= 0) & (local < op.num_experts)
        ids = torch.where(mine, local, op.num_experts).to(torch.int32)
        ordered, places, counts, scales = vendor.npu_moe_init_routing_v2(
            x,
            ids,
            scale=scale,
            active_num=ids.numel(),
            expert_num=op.num_experts + 1,
            expert_tokens_num_type=_COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, op.num_experts],
            quant_mode=_UNQUANTIZED,
        )
        hidden = gate(product(ordered, scales, args.gate_up, counts))
        again, scales = _requantized(hidden, op.scheme == "int8")
        out = product(again, scales, args.down, counts)
        rows = vendor.npu_moe_token_unpermute(out, places.clamp(min=0)).unflatten(0, (-1, op.top_k))
        # Weighed here, since the call would round the weights; rows of no expert hold whatever memory held.
        weighed = torch.where(mine[..., None], rows.float() * args.weights[..., None], 0.0)
        summed: Tensor = weighed.sum(1).to(dtype)
        return summed

    return run


def _rows(x: Tensor | Quantized, *, quantize: bool) -> tuple[Tensor, Tensor | None]:
    if isinstance(x, Quantized) or quantize:
        return quantized_rows(x)
    return x.contiguous(), None


def _requantized(hidden: Tensor, quantize: bool) -> tuple[Tensor, Tensor | None]:
    return quantized_rows(hidden) if quantize else (hidden, None)


Product = Callable[[Tensor, Tensor | None, AscendPacked, Tensor], Tensor]
"""(rows in the order of experts, their scales, weights, tokens of each expert) -> rows."""


def _dense_product() -> Product:
    vendor = npu()

    def product(x: Tensor, scales: Tensor | None, weight: AscendPacked, counts: Tensor) -> Tensor:
        out: Tensor = vendor.npu_grouped_matmul(
            [x],
            [weight.tensors()["weight"]],
            split_item=_ONE_RESULT,
            group_list_type=_COUNTS,
            group_type=_BY_ROWS,
            group_list=counts,
        )[0]
        return out

    return product


def _int8_product(dtype: torch.dtype) -> Product:
    vendor = npu()

    def product(x: Tensor, scales: Tensor | None, weight: AscendPacked, counts: Tensor) -> Tensor:
        assert scales is not None
        parts = weight.tensors()
        out: Tensor = vendor.npu_grouped_matmul(
            [x],
            [parts["weight"]],
            scale=[parts["scale"]],
            per_token_scale=[scales],
            split_item=_ONE_RESULT,
            group_list_type=_COUNTS,
            group_type=_BY_ROWS,
            group_list=counts,
            output_dtype=dtype,
        )[0]
        return out

    return product
