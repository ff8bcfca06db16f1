"""Where recurrent state is read and written: slots of STATE caches, with a state after every token of a decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend.batch import Plan

__all__ = ["Lane", "lanes", "load_states", "run_recurrence", "store_states"]

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(states [n, ...], token indices [n]) -> (next states, outputs [n, ...])."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One request's way through a recurrent layer.

    Args:
        start: Its first token.
        num_tokens: Tokens in the step.
        source: Slot of its start state; 0 for zeros.
        slots: 1 + K slots for the states after its first tokens.
        checkpoint: Slot that gets a copy of the end state; -1 for none.
    """

    start: int
    num_tokens: int
    source: int
    slots: tuple[int, ...]
    checkpoint: int

    def targets(self, token: int) -> list[int]:
        """Slots that get the state after token `token`. Slot 0 is the null slot, which nobody writes."""
        at_end = token == self.num_tokens - 1
        if self.num_tokens <= len(self.slots):
            slots = [self.slots[token]]
        else:
            slots = [self.slots[0]] if at_end else []
        return [slot for slot in (*slots, self.checkpoint if at_end else -1) if slot > 0]


def lanes(plan: Plan) -> list[Lane]:
    """Every request of the step that has tokens; reads slots and counts from the device."""
    group, starts = plan.group, plan.batch.query_start_loc_host
    assert group.state_slots is not None and group.num_accepted is not None, "a plan of a STATE group has slots"
    slots, accepted = group.state_slots.tolist(), group.num_accepted.tolist()
    checkpoints = [-1] * len(slots) if group.checkpoint_slots is None else group.checkpoint_slots.tolist()
    found = []
    for row in range(plan.batch.num_reqs):
        count = starts[row + 1] - starts[row]
        if count > 0:
            source = max(0, slots[row][accepted[row] - 1]) if accepted[row] else 0
            found.append(Lane(starts[row], count, source, tuple(slots[row]), checkpoints[row]))
    return found


def load_states(plane: Tensor, group: Sequence[Lane], dtype: torch.dtype) -> Tensor:
    """Start states [len(group), ...] in `dtype`; zeros for slot 0, whatever lies there."""
    sources = torch.tensor([lane.source for lane in group], device=plane.device)
    states = plane.index_select(0, sources).to(dtype)
    return torch.where((sources > 0).view(-1, *[1] * (states.dim() - 1)), states, torch.zeros_like(states))


def store_states(plane: Tensor, states: Tensor, group: Sequence[Lane], token: int) -> None:
    """Writes the states [len(group), ...] after token `token` of each lane to where they belong."""
    pairs = [(slot, row) for row, lane in enumerate(group) for slot in lane.targets(token)]
    if pairs:
        targets, rows = torch.tensor(pairs, device=plane.device).unbind(1)
        plane.index_copy_(0, targets, states.index_select(0, rows).to(plane.dtype))


def run_recurrence(plan: Plan, plane: Tensor, out: Tensor, step: Step, by_request: bool) -> None:
    """Runs `step` token after token, all requests side by side, and keeps states and outputs.

    Args:
        plane: [slots, ...]; read and written.
        out: [T, ...], in the type to compute in; written.
        by_request: One request at a time, so that a request's bits do not depend on the others.
    """
    every = lanes(plan)
    for group in [[lane] for lane in every] if by_request else [every] if every else []:
        _run_group(group, plane, out, step)


def _run_group(group: list[Lane], plane: Tensor, out: Tensor, step: Step) -> None:
    states = load_states(plane, group, out.dtype)
    for token in range(max(lane.num_tokens for lane in group)):
        rows = [row for row, lane in enumerate(group) if lane.num_tokens > token]
        if len(rows) < len(group):
            states = states[torch.tensor(rows, device=states.device)]
            group = [group[row] for row in rows]
        tokens = torch.tensor([lane.start + token for lane in group], device=out.device)
        states, mixed = step(states, tokens)
        out.index_copy_(0, tokens, mixed)
        store_states(plane, states, group, token)
