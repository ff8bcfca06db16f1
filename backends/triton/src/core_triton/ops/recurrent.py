"""What the recurrent layers have alike: their slots on the device, and which requests are short."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from core.backend import Plan

__all__ = ["SLOT_SIGNATURE", "num_short", "slots_of"]

SLOT_SIGNATURE = {"starts": "*i32", "state_slots": "*i32", "num_accepted": "*i32", "checkpoints": "*i32"}
"""Triton's types of what `slots_of` gives."""


def slots_of(plan: Plan, first: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    """(starts, state_slots, num_accepted, checkpoints) of the requests from `first` on, and whether there are
    checkpoints, as a constant of kernels."""
    group = plan.group
    slots, accepted = group.state_slots, group.num_accepted
    assert slots is not None and accepted is not None, "a plan of a STATE group has slots"
    checkpoints = group.checkpoint_slots
    return (
        plan.query_start_loc[first:],
        slots[first:],
        accepted[first:],
        accepted[first:] if checkpoints is None else checkpoints[first:],
        {"CHECKPOINTS": checkpoints is not None},
    )


def num_short(plan: Plan) -> int:
    """Leading requests with no more tokens than slots, which keep a state after each of them."""
    assert plan.group.state_slots is not None
    width, starts = plan.group.state_slots.shape[1], plan.batch.query_start_loc_host
    count = min(plan.batch.num_decodes, plan.batch.num_reqs)
    while count and starts[count] - starts[count - 1] > width:
        count -= 1
    while count < plan.batch.num_reqs and starts[count + 1] - starts[count] <= width:
        count += 1
    return count
