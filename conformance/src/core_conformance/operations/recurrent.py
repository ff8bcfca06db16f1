"""Steps of recurrent layers: states in slots, drafts, checkpoints, and poison in every slot that nobody owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, Plan
from core.backend.ops import OpSpec
from core.spec import CacheKind, DType, KVCacheSpec
from core_conformance.diagnosis import Places
from core_conformance.operations.cache_memory import Poison, int32, new_cache
from core_conformance.subject import Mismatch, Subject

__all__ = ["Lane", "Layer", "StateStep"]

Inputs = dict[str, Tensor]
Recur = Callable[[Any, Inputs, Tensor, torch.dtype], tuple[Tensor, list[Tensor]]]
"""(op, tokens of one request, start state, type to compute in) -> (outputs, state after each token)."""


@dataclass(frozen=True)
class Layer:
    """One recurrent operation with inputs of its own.

    Args:
        op: The operation.
        state_shape: Of one slot.
        state_dtype: Of the cache.
        draw: Number of tokens, generator -> its inputs, on the host.
        per_token: Names of the inputs that have a row for each token.
        recur: The recurrence as it is written, token after token, for one request.
    """

    op: OpSpec
    state_shape: tuple[int, ...]
    state_dtype: DType
    draw: Callable[[int, torch.Generator], Inputs]
    per_token: frozenset[str]
    recur: Recur

    @property
    def spec(self) -> KVCacheSpec:
        """The cache of one layer."""
        return KVCacheSpec(
            kind=CacheKind.STATE,
            num_kv_heads=1,
            head_dim=1,
            v_head_dim=1,
            dtype=self.state_dtype,
            state_shapes=(self.state_shape,),
        )

    def tokens(self, inputs: Inputs, rows: slice) -> Inputs:
        """The inputs of some tokens."""
        return {name: x[rows] if name in self.per_token else x for name, x in inputs.items()}


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One request of a step.

    Args:
        tokens: Of the step; 0 is allowed.
        slots: For the states after its first tokens.
        accepted: Tokens of the step before that stayed; 0 starts from zeros.
        checkpoint: Slot for a copy of the end state; -1 for none.
    """

    tokens: int
    slots: tuple[int, ...]
    accepted: int = 1
    checkpoint: int = -1

    @property
    def source(self) -> int:
        """Slot of its start state; 0 for zeros."""
        return self.slots[self.accepted - 1] if self.accepted else 0

    def written(self) -> dict[int, int]:
        """Slot to the token after which its state goes there."""
        if not self.tokens:
            return {}
        last = self.tokens - 1
        found = (
            {self.slots[0]: last}
            if self.tokens > len(self.slots)
            else dict(zip(self.slots, range(self.tokens), strict=False))
        )
        return found | ({self.checkpoint: last} if self.checkpoint > 0 else {})


@dataclass
class StateStep:
    """A step of a recurrent layer over states that are drawn for it.

    Args:
        subject: The backend.
        layer: The operation.
        lanes: Requests, those with the fewest tokens first.
        seed: Of inputs and states.
        num_slots: Slots of the cache, the null slot 0 included.
        padding: Tokens of padding behind the requests, each a request with a slot 0.
    """

    subject: Subject
    layer: Layer
    lanes: Sequence[Lane]
    seed: int = 0
    num_slots: int = 16
    padding: int = 0
    inputs: Inputs = field(init=False)
    states: Tensor = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        self.inputs = self.layer.draw(self.num_tokens + self.padding, draw)
        shape = (self.num_slots, *self.layer.state_shape)
        self.states = torch.randn(*shape, generator=draw).to(getattr(torch, self.layer.state_dtype.value))

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return sum(lane.tokens for lane in self.lanes)

    @property
    def starts(self) -> list[int]:
        """Where each request's tokens begin, and the end."""
        found = [0]
        for lane in self.lanes:
            found.append(found[-1] + lane.tokens)
        return found

    @property
    def places(self) -> Places:
        """Request and position within the step of each token."""
        pairs = [(row, at) for row, lane in enumerate(self.lanes) for at in range(lane.tokens)]
        return Places(requests=[row for row, _ in pairs], positions=[at for _, at in pairs])

    def plan(self) -> Plan:
        """The device's plan."""
        put, width = self.subject.put, len(self.lanes[0].slots)
        starts = self.starts + [self.num_tokens + i + 1 for i in range(self.padding)]
        counts = [end - start for start, end in pairwise(starts)]
        slots = [list(lane.slots) for lane in self.lanes] + [[0] * width] * self.padding
        lens = [max(count, 1) for count in counts]
        group = GroupBatch(
            block_table=put(int32([[row[0]] for row in slots])),
            slots=put(int32([-1] * starts[-1])),
            seq_lens=put(int32(lens)),
            seq_lens_host=lens,
            state_slots=put(int32(slots)),
            num_accepted=put(int32([lane.accepted for lane in self.lanes] + [0] * self.padding)),
            checkpoint_slots=put(int32([lane.checkpoint for lane in self.lanes] + [-1] * self.padding)),
        )
        batch = Batch(
            num_reqs=len(counts),
            num_tokens=starts[-1],
            num_decodes=sum(count <= width for count in counts),
            max_query_len=max(counts),
            token_ids=put(int32([0] * starts[-1])),
            positions=put(int32([0] * starts[-1])),
            query_start_loc=put(int32(starts)),
            query_start_loc_host=starts,
            num_valid_tokens=put(int32([self.num_tokens])),
            groups=(group,),
            logits_indices=put(int32([max(end - 1, 0) for end in starts[1:]])),
        )
        layout = self.subject.backend.kv_layout(self.layer.spec, 1)
        return self.subject.backend.plan(batch, GroupSpec(index=0, layout=layout, ops=(self.layer.op,)))

    def plane(self, poison: Poison) -> Tensor:
        """The cache on the device: some state in each slot that a request has, poison in all others."""
        slab = new_cache(self.subject, self.layer.spec, 1, self.num_slots, poison)
        planes = slab.views()
        shapes = [tuple(plane.shape) for plane in planes]
        if shapes != [tuple(self.states.shape)]:
            raise Mismatch(f"kv_layout of a STATE cache must have one plane {tuple(self.states.shape)}, got {shapes}")
        for slot in {slot for lane in self.lanes for slot in lane.slots}:
            self.subject.backend.to_device(self.states[slot].clone(), planes[0][slot]).wait()
        return planes[0]

    def run(self, plane: Tensor) -> Tensor:
        """The device's outputs; states go to `plane`."""
        given = dict(self.inputs)
        for name in self.layer.per_token:
            given[name] = given[name].clone()
            given[name][self.num_tokens :] = float("nan")
        moved: dict[str, Any] = {name: self.subject.put(x) for name, x in given.items()}
        out: Tensor = self.subject.bind(self.layer.op)(
            self.layer.op.args(**moved, cache=(plane,), plan=self.plan())  # type: ignore[call-arg]
        )
        return out

    def exact(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[int, Tensor]]:
        """(outputs of the real tokens, slot to the state that must lie there), computed in `dtype`."""
        outs, kept = [], {}
        for start, lane in zip(self.starts, self.lanes, strict=False):
            state = self.states[lane.source].to(dtype) if lane.source else torch.zeros(self.layer.state_shape).to(dtype)
            tokens = self.layer.tokens(self.inputs, slice(start, start + lane.tokens))
            out, states = self.layer.recur(self.layer.op, tokens, state, dtype)
            outs.append(out)
            kept.update({slot: states[token] for slot, token in lane.written().items()})
        return torch.cat(outs), kept
