"""Recurrent layers with one bug each: their arithmetic, and which state they start from and leave behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import Conv1dArgs, GatedDeltaArgs, GatedDeltaOp, SsdArgs, SsdOp
from core.backend.reference.states import run_recurrence
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.planting import before, changed_op
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS"]

_LAYERS = ("conv1d", "gated_delta", "ssd")


def _with_group(args: Any, **changes: Any) -> Any:
    group = dataclasses.replace(args.plan.group, **changes)
    return dataclasses.replace(args, plan=dataclasses.replace(args.plan, group=group))


def _starts_from_zero(op: Any, args: Any) -> Any:
    return _with_group(args, num_accepted=torch.zeros_like(args.plan.group.num_accepted))


def _never_from_zero(op: Any, args: Any) -> Any:
    """num_accepted 0 is taken for 1."""
    return _with_group(args, num_accepted=args.plan.group.num_accepted.clamp(min=1))


def _state_after_the_last_draft(op: Any, args: Any) -> Any:
    """A step goes on behind the last draft of the step before, accepted or not."""
    last = args.plan.group.state_slots.shape[1]
    accepted = args.plan.group.num_accepted
    return _with_group(args, num_accepted=torch.where(accepted > 0, last, accepted))


def _no_checkpoints(op: Any, args: Any) -> Any:
    return _with_group(args, checkpoint_slots=None)


def _leaves(change: Callable[[Any, Tensor, Tensor], None]) -> Maker:
    """The reference with states spoilt behind it: `change(record, plane before, plane)`."""

    def make(op: Any) -> Callable[[Any], Any]:
        honest = oracle(op)

        def run(args: Any) -> Any:
            plane = args.cache[0]
            old = plane.clone()
            out = honest(args)
            change(args, old, plane)
            return out

        return run

    return make


def _first_token_only(args: Any, old: Tensor, plane: Tensor) -> None:
    """States after the drafts of a decode are not kept."""
    later = args.plan.group.state_slots[:, 1:].flatten().long()
    later = later[later > 0]
    plane[later] = old[later]


def _idle_request_cleared(args: Any, old: Tensor, plane: Tensor) -> None:
    """A request without tokens in the step loses its state."""
    starts = torch.tensor(args.plan.batch.query_start_loc_host)
    idle = args.plan.group.state_slots[: len(starts) - 1][starts.diff() == 0].flatten().long()
    plane[idle[idle > 0]] = 0


def _taps_from_the_other_end(op: Any, args: Conv1dArgs) -> Conv1dArgs:
    return dataclasses.replace(args, weight=args.weight.flip(1))


def _no_bias(op: Any, args: Conv1dArgs) -> Conv1dArgs:
    return dataclasses.replace(args, bias=None)


def _no_decay(op: GatedDeltaOp, args: GatedDeltaArgs) -> GatedDeltaArgs:
    return dataclasses.replace(args, gate=torch.zeros_like(args.gate))


def _beta_one(op: GatedDeltaOp, args: GatedDeltaArgs) -> GatedDeltaArgs:
    return dataclasses.replace(args, beta=torch.ones_like(args.beta))


def _adds_without_asking(op: GatedDeltaOp) -> Callable[[GatedDeltaArgs], Tensor]:
    """The value is added to what the key held: linear attention without the delta."""
    repeat = op.num_v_heads // op.num_k_heads

    def heads(x: Tensor) -> Tensor:
        x = x.float()
        if op.qk_l2norm:
            x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(repeat, dim=1)

    def gated_delta(args: GatedDeltaArgs) -> Tensor:
        query, key, value = heads(args.query) * op.scale, heads(args.key), args.value.float()

        def step(state: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            added = key[t][..., None] * (args.beta[t][..., None] * value[t])[:, :, None]
            state = torch.exp(args.gate[t])[..., None, None] * state + added
            return state, torch.einsum("nhk,nhkv->nhv", query[t], state)

        out = torch.zeros_like(value)
        run_recurrence(args.plan, args.cache[0], out, step, by_request=False)
        return out.to(torch_dtype(op.dtype))

    return gated_delta


def _key_heads_dealt_round(op: GatedDeltaOp) -> Callable[[GatedDeltaArgs], Tensor]:
    """Value head h uses key head h % num_k_heads."""
    flat = oracle(dataclasses.replace(op, num_k_heads=op.num_v_heads))
    repeat = op.num_v_heads // op.num_k_heads

    def gated_delta(args: GatedDeltaArgs) -> Tensor:
        query, key = (x.repeat(1, repeat, 1) for x in (args.query, args.key))
        out: Tensor = flat(dataclasses.replace(args, query=query, key=key))
        return out

    return gated_delta


def _groups_dealt_round(op: SsdOp) -> Callable[[SsdArgs], Tensor]:
    """Head h uses group h % num_groups."""
    flat = oracle(dataclasses.replace(op, num_groups=op.num_heads))
    repeat = op.num_heads // op.num_groups

    def ssd(args: SsdArgs) -> Tensor:
        out: Tensor = flat(dataclasses.replace(args, b=args.b.repeat(1, repeat, 1), c=args.c.repeat(1, repeat, 1)))
        return out

    return ssd


def _zeros_for(field: str) -> Maker:
    return before(lambda op, args: dataclasses.replace(args, **{field: torch.zeros_like(getattr(args, field))}))


def _each(name: str, first: str, maker: Maker) -> tuple[Mutant, ...]:
    return tuple(kernel_bug(f"{layer}: {name}", first.format(layer), {layer: maker}) for layer in _LAYERS)


MUTANTS: tuple[Mutant, ...] = (
    *_each("state not carried", "{}/", before(_starts_from_zero)),
    *_each("no start from zeros", "{}/", before(_never_from_zero)),
    *_each("state behind refused drafts", "{}/drafts", before(_state_after_the_last_draft)),
    *_each("no checkpoints", "{}/checkpoints", before(_no_checkpoints)),
    *_each("states of drafts not kept", "{}/drafts", _leaves(_first_token_only)),
    *_each("idle request loses its state", "recurrent/no-tokens-{}", _leaves(_idle_request_cleared)),
    kernel_bug("taps from the other end", "conv1d/impulse", {"conv1d": before(_taps_from_the_other_end)}),
    kernel_bug("convolution always silu", "conv1d/form", {"conv1d": changed_op(activation=lambda op: "silu")}),
    kernel_bug("convolution without its bias", "conv1d/", {"conv1d": before(_no_bias)}),
    kernel_bug("delta rule without decay", "gated_delta/", {"gated_delta": before(_no_decay)}),
    kernel_bug("beta taken for 1", "gated_delta/memory", {"gated_delta": before(_beta_one)}),
    kernel_bug("value added to what the key held", "gated_delta/memory", {"gated_delta": _adds_without_asking}),
    kernel_bug("delta rule without its scale", "gated_delta/", {"gated_delta": changed_op(scale=lambda op: 1.0)}),
    kernel_bug("keys always normed", "gated_delta/form", {"gated_delta": changed_op(qk_l2norm=lambda op: True)}),
    kernel_bug("key heads dealt round", "gated_delta/", {"gated_delta": _key_heads_dealt_round}),
    kernel_bug("ssd without d", "ssd/counting", {"ssd": _zeros_for("d")}),
    kernel_bug("ssd without decay", "ssd/decay", {"ssd": _zeros_for("a")}),
    kernel_bug("ssd without the bias of its steps", "ssd/", {"ssd": _zeros_for("dt_bias")}),
    kernel_bug("steps never clamped", "ssd/", {"ssd": changed_op(dt_min=lambda op: 0.0, dt_max=lambda op: 1e9)}),
    kernel_bug("groups dealt round", "ssd/", {"ssd": _groups_dealt_round}),
)
