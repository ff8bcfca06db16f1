"""Slots of recurrent state: where a request starts from, and where the state after a token goes."""

import triton
import triton.language as tl

__all__ = ["source_slot", "target_slots"]


@triton.jit
def source_slot(state_slots, num_accepted, request, stride):
    """The slot of the start state; 0 starts from zeros."""
    count = tl.load(num_accepted + request)
    slot = tl.load(state_slots + request * stride + count - 1, mask=count > 0, other=0)
    return tl.maximum(slot, 0).to(tl.int64)


@triton.jit
def target_slots(state_slots, checkpoints, request, stride, num_slots, index, count, CHECKPOINTS: tl.constexpr):
    """(slot, checkpoint) of the state after token `index` of `count`; what is not above 0 gets nothing.

    With more tokens than slots only the end state is kept.
    """
    at_end = index == count - 1
    short = count <= num_slots
    at = state_slots + request * stride + tl.where(short, index, 0)
    slot = tl.load(at, mask=short | at_end, other=0).to(tl.int64)
    checkpoint = slot * 0
    if CHECKPOINTS:
        checkpoint = tl.load(checkpoints + request, mask=at_end, other=0).to(tl.int64)
    return slot, checkpoint
