"""The gated delta rule: chunks of prompts in one call, decodes with their drafts in another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import Plan
from core.backend.ops import GatedDeltaArgs, GatedDeltaOp
from core.backend.reference.cache import scatter_tokens
from core_ascend.vendor import npu

__all__ = ["gated_delta"]

_TINY = 1e-6


def gated_delta(op: GatedDeltaOp) -> Callable[[GatedDeltaArgs], Tensor]:
    """States leave the cache in bfloat16 and transposed, which is what the calls take, and come back."""

    def run(args: GatedDeltaArgs) -> Tensor:
        query, key = args.query, args.key
        if op.qk_l2norm:
            query, key = _unit(query), _unit(key)
        parts = _Parts(query=query, key=key, value=args.value, gate=args.gate, beta=args.beta)
        plan, plane = args.plan, args.cache[0]
        drafts = _drafts(plan)
        first = plan.batch.num_decodes if drafts else 0
        cut = int(plan.batch.query_start_loc_host[first])
        outs = []
        if first:
            outs.append(_decode(op, parts.narrow(0, cut), plan, plane, first))
        if first < plan.batch.num_reqs:
            outs.append(_chunks(op, parts.narrow(cut, len(query)), plan, plane, first))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    return run


class _Parts:
    """Per-token tensors, contiguous and in the types of the calls."""

    def __init__(self, *, query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor) -> None:
        self.query, self.key, self.value, self.gate, self.beta = query, key, value, gate, beta

    def narrow(self, start: int, end: int) -> _Parts:
        """Tokens [start, end)."""
        cut = slice(start, end)
        return _Parts(
            query=self.query[cut].contiguous(),
            key=self.key[cut].contiguous(),
            value=self.value[cut].contiguous(),
            gate=self.gate[cut].float().contiguous(),
            beta=self.beta[cut].to(self.value.dtype).contiguous(),
        )


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one, rounded to the type that the calls take."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _TINY)).to(x.dtype)


def _drafts(plan: Plan) -> int:
    """Draft tokens that a request may have."""
    slots = plan.group.state_slots
    assert slots is not None and plan.group.num_accepted is not None, "a plan of a STATE group has slots"
    return slots.shape[1] - 1


def _chunks(op: GatedDeltaOp, parts: _Parts, plan: Plan, plane: Tensor, first: int) -> Tensor:
    """Requests from `first` on: one state in, one state out, written to slot 0 of each."""
    group, rows = plan.group, slice(first, None)
    assert group.state_slots is not None and group.num_accepted is not None
    slots, accepted = group.state_slots[rows], group.num_accepted[rows]
    sources = slots.gather(1, (accepted.long() - 1).clamp(min=0)[:, None])[:, 0]
    known = (accepted > 0) & (sources > 0)
    states = torch.where(known.view(-1, 1, 1, 1), _to_call(plane.index_select(0, sources)), 0.0)
    out, ends = npu().npu_chunk_gated_delta_rule(
        parts.query,
        parts.key,
        parts.value,
        beta=parts.beta,
        initial_state=states,
        actual_seq_lengths=plan.query_start_loc.diff()[rows].to(torch.int32),
        scale=op.scale,
        g=parts.gate,
    )
    new = _from_call(ends, plane.dtype)
    scatter_tokens(plane, new, _writable(slots[:, 0]))
    if group.checkpoint_slots is not None:
        scatter_tokens(plane, new, _writable(group.checkpoint_slots[rows]))
    result: Tensor = out
    return result


def _decode(op: GatedDeltaOp, parts: _Parts, plan: Plan, plane: Tensor, count: int) -> Tensor:
    """The first `count` requests: a state after each token, in slots of their own."""
    group = plan.group
    assert group.state_slots is not None and group.num_accepted is not None
    slots, accepted = group.state_slots[:count], group.num_accepted[:count]
    width = slots.shape[1]
    starts = plan.query_start_loc[: count + 1]
    lengths = starts.diff()
    # A scratch copy: [request, width] states, so that none of another request can be touched.
    states = _to_call(plane.index_select(0, slots.flatten()))
    fresh = ((accepted == 0)[:, None] | (slots <= 0)).flatten()
    states = torch.where(fresh.view(-1, 1, 1, 1), 0.0, states)
    tokens = torch.arange(len(parts.query), device=slots.device, dtype=torch.int32)
    owner = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
    places = (owner * width + tokens - starts.index_select(0, owner)).to(torch.int32)
    out: Tensor = npu().npu_recurrent_gated_delta_rule(
        parts.query,
        parts.key,
        parts.value,
        states,
        beta=parts.beta,
        scale=op.scale,
        actual_seq_lengths=lengths.to(torch.int32),
        ssm_state_indices=places,
        num_accepted_tokens=accepted.clamp(min=1),
        g=parts.gate,
    )
    new = _from_call(states, plane.dtype)
    steps = torch.arange(width, device=slots.device)
    reached = steps < lengths[:, None]
    scatter_tokens(plane, new, _writable(torch.where(reached, slots, -1)).flatten())
    if group.checkpoint_slots is not None:
        last = (torch.arange(count, device=slots.device) * width + lengths - 1).long()
        scatter_tokens(plane, new.index_select(0, last), _writable(group.checkpoint_slots[:count]))
    return out


def _writable(slots: Tensor) -> Tensor:
    """Slots with -1 for the null slot, which nobody writes."""
    return torch.where(slots > 0, slots, -1)


def _to_call(states: Tensor) -> Tensor:
    """[n, heads, v_dim, k_dim], bfloat16, of [n, heads, k_dim, v_dim]."""
    return states.transpose(-2, -1).to(torch.bfloat16).contiguous()


def _from_call(states: Tensor, dtype: torch.dtype) -> Tensor:
    return states.transpose(-2, -1).to(dtype).contiguous()
