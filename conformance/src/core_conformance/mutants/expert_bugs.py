"""Mixture of experts with one bug each: routing, the experts' products, and the way to other ranks and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed
from core.backend.ops import DispatchArgs, ExpertsArgs, ExpertsOp, RouteArgs, RouteOp
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.planting import after, before, changed_op
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS"]

Routed = tuple[Tensor, Tensor]
"""(weights, expert ids)."""


def _bias_in_the_weights(op: RouteOp, args: RouteArgs, out: Routed) -> Routed:
    if args.bias is None:
        return out
    weights, ids = out
    more = weights + args.bias[ids.long()]
    return more / more.sum(-1, keepdim=True) * op.scaling, ids


def _higher_id_of_equals(op: RouteOp) -> Callable[[RouteArgs], Routed]:
    """Ties go to the last expert: the choice is made from the other end of the list."""
    honest = oracle(op)

    def route(args: RouteArgs) -> Routed:
        bias = None if args.bias is None else args.bias.flip(-1)
        weights, ids = honest(dataclasses.replace(args, router_logits=args.router_logits.flip(-1), bias=bias))
        return weights, op.num_experts - 1 - ids

    return route


def _rising_order(op: RouteOp, args: RouteArgs, out: Routed) -> Routed:
    return out[0].flip(-1), out[1].flip(-1)


def _powers_overflow(op: RouteOp, args: RouteArgs, out: Routed) -> Routed:
    """Softmax without its maximum."""
    if op.scoring != "softmax":
        return out
    overflowed = torch.exp(args.router_logits.float()).isinf().any(-1, keepdim=True)
    return out[0].masked_fill(overflowed, float("nan")), out[1]


def _group_by_its_best(op: RouteOp) -> Callable[[RouteArgs], Routed]:
    """A group counts its best expert, also with a bias."""
    if not op.has("bias") or op.num_groups == 1:
        return oracle(op)
    ranked = oracle(dataclasses.replace(op, features=frozenset(), renormalize=False, scaling=1.0))

    def route(args: RouteArgs) -> Routed:
        assert args.bias is not None
        scores = args.router_logits.softmax(-1) if op.scoring == "softmax" else args.router_logits.sigmoid()
        choice = (scores + args.bias).clamp(1e-6, 4.0) / 5.0  # the logit of it is what `ranked` sorts by
        _, ids = ranked(RouteArgs(router_logits=torch.log(choice / (1 - choice))))
        weights = scores.gather(-1, ids.long())
        return weights / (weights.sum(-1, keepdim=True) if op.renormalize else 1.0) * op.scaling, ids

    return route


# -- products ----------------------------------------------------------------------------------------------------------


def _all_weights_one(op: ExpertsOp, args: ExpertsArgs) -> ExpertsArgs:
    return dataclasses.replace(args, weights=torch.ones_like(args.weights))


def _with_gate_up(args: ExpertsArgs, change: Callable[[Tensor], Tensor]) -> ExpertsArgs:
    parts = {name: change(part) for name, part in args.gate_up.tensors().items()}
    return dataclasses.replace(
        args, gate_up=Packed(shape=args.gate_up.shape, scheme=args.gate_up.scheme, tensors=parts)
    )


def _up_before_gate(op: ExpertsOp, args: ExpertsArgs) -> ExpertsArgs:
    half = op.intermediate_size

    def exchanged(part: Tensor) -> Tensor:
        return torch.cat((part[:, half:], part[:, :half]), dim=1) if part.shape[1] == 2 * half else part

    return _with_gate_up(args, exchanged)


def _next_experts_gate(op: ExpertsOp, args: ExpertsArgs) -> ExpertsArgs:
    """gate_up is that of the expert behind."""
    return _with_gate_up(args, lambda part: part.roll(1, dims=0))


def _scales_of_the_first_expert(op: ExpertsOp, args: ExpertsArgs) -> ExpertsArgs:
    """All experts share the scales of the first one."""
    if "scale" not in args.gate_up.tensors():
        return args
    parts = dict(args.gate_up.tensors())
    parts["scale"] = parts["scale"][:1].expand_as(parts["scale"]).clone()
    return dataclasses.replace(
        args, gate_up=Packed(shape=args.gate_up.shape, scheme=args.gate_up.scheme, tensors=parts)
    )


def _one_of_two_choices(op: ExpertsOp, args: ExpertsArgs) -> ExpertsArgs:
    """The last choice of each token is dropped."""
    weights = args.weights.clone()
    weights[:, 1:] = 0
    return dataclasses.replace(args, weights=weights)


_packed: dict[int, tuple[Packed, Packed]] = {}
"""Weights by identity, held so that no other takes their place, and what a kernel made of them."""


def _at_first_use(op: ExpertsOp, args: ExpertsArgs) -> ExpertsArgs:
    """Weights are brought into the kernel's form at their first use, and never again."""

    def kept(weight: Packed) -> Packed:
        if id(weight) not in _packed:
            parts = {name: part.clone() for name, part in weight.tensors().items()}
            _packed[id(weight)] = weight, Packed(shape=weight.shape, scheme=weight.scheme, tensors=parts)
        return _packed[id(weight)][1]

    return dataclasses.replace(args, gate_up=kept(args.gate_up), down=kept(args.down))


def _padding_goes_to_expert_0(op: Any, args: DispatchArgs, out: Any) -> Any:
    return out[0], out[1], out[2].clamp(min=0)


def _padding_in_front(op: Any, args: DispatchArgs, out: Any) -> Any:
    missing = op.capacity - len(args.x)
    return tuple(part.roll(missing, dims=0) for part in out)


def _route(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"route{first}", {"route": maker})


def _experts(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"experts{first}", {"experts": maker})


MUTANTS: tuple[Mutant, ...] = (
    _route("weights not divided by their sum", "/", changed_op(renormalize=lambda op: False)),
    _route("scaling left out", "/scaled", changed_op(scaling=lambda op: 1.0)),
    _route("softmax for sigmoid", "/sigmoid", changed_op(scoring=lambda op: "softmax")),
    _route("bias counts in the weights", "/bias", after(_bias_in_the_weights)),
    _route("groups ignored", "/groups", changed_op(num_groups=lambda op: 1, top_k_groups=lambda op: 1)),
    _route("a group counts its best expert alone", "/groups-bias", _group_by_its_best),
    _route("higher id of equals", "/ties", _higher_id_of_equals),
    _route("experts in rising order", "/", after(_rising_order)),
    _route("router's powers overflow", "/extremes", after(_powers_overflow)),
    _experts("expert without its weight", "", before(_all_weights_one)),
    _experts("up before gate", "", before(_up_before_gate)),
    _experts("gate of the next expert", "/which", before(_next_experts_gate)),
    _experts("first_expert ignored", "/other-ranks", changed_op(first_expert=lambda op: 0)),
    _experts("experts always silu", "/gelu", changed_op(activation=lambda op: "silu")),
    _experts("second choice dropped", "/which", before(_one_of_two_choices)),
    _experts("scales of the first expert", "/scheme", before(_scales_of_the_first_expert)),
    _experts("experts kept from their first use", "/update", before(_at_first_use)),
    kernel_bug("padding goes to expert 0", "dispatch", {"dispatch": after(_padding_goes_to_expert_0)}),
    kernel_bug("padding in front", "dispatch", {"dispatch": after(_padding_in_front)}),
    kernel_bug("rows brought back from the end", "combine", {"combine": after(lambda op, args, out: out.flip(0))}),
)
