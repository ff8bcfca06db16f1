"""Causal depthwise convolution: results first, then the states that they leave; nothing reads what another writes."""

import triton
import triton.language as tl

from core_triton.kernels.requests import request_of_token
from core_triton.kernels.states import source_slot, target_slots

__all__ = ["conv1d_kernel", "conv1d_state_kernel"]


@triton.jit
def conv1d_kernel(
    x,
    weight,
    bias,
    plane,
    out,
    starts,
    state_slots,
    num_accepted,
    num_requests,
    channels,
    x_stride,
    w_stride,
    slot_stride,
    row_stride,
    table_stride,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, blocks of channels); `out` is contiguous, [tokens, channels]."""
    token = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    request = request_of_token(starts, num_requests, token)
    start = tl.load(starts + request)
    source = source_slot(state_slots, num_accepted, request, table_stride)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        at = token + tap - (WIDTH - 1)
        own = at >= start
        value = tl.load(x + at.to(tl.int64) * x_stride + channel, mask=inside & own, other=0.0).to(tl.float32)
        row = plane + source * slot_stride + (at - start + WIDTH - 1) * row_stride
        before = inside & (at < start) & (source > 0)
        value += tl.load(row + channel, mask=before, other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * w_stride + tap, mask=inside, other=0.0).to(tl.float32)
        total += value * factor
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token.to(tl.int64) * channels + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def conv1d_state_kernel(
    x,
    plane,
    starts,
    state_slots,
    num_accepted,
    checkpoints,
    channels,
    num_slots,
    x_stride,
    slot_stride,
    row_stride,
    table_stride,
    WIDTH: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (requests, blocks of channels). The start state is read whole before anything is written over it."""
    request = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    source = source_slot(state_slots, num_accepted, request, table_stride)
    rows = tl.arange(0, BLOCK_W)
    old = tl.load(
        plane + source * slot_stride + (rows * row_stride)[:, None] + channel[None, :],
        mask=(rows < WIDTH - 1)[:, None] & inside[None, :] & (source > 0),
        other=0.0,
    ).to(tl.float32)
    tl.debug_barrier()
    first = tl.where(count <= num_slots, 0, count - 1)
    for index in range(first, count):
        slot, checkpoint = target_slots(
            state_slots, checkpoints, request, table_stride, num_slots, index, count, CHECKPOINTS
        )
        for row in tl.static_range(WIDTH - 1):
            # Inputs in a row: the old state's WIDTH - 1, then the request's tokens.
            at = index + 1 + row
            kept = tl.sum(tl.where((rows == at)[:, None], old, 0.0), 0)
            token = (start + at - (WIDTH - 1)).to(tl.int64)
            own = at >= WIDTH - 1
            value = tl.load(x + token * x_stride + channel, mask=inside & own, other=0.0).to(tl.float32)
            value = tl.where(own, value, kept).to(plane.dtype.element_ty)
            to = plane + row * row_stride + channel
            tl.store(to + slot * slot_stride, value, mask=inside & (slot > 0))
            tl.store(to + checkpoint * slot_stride, value, mask=inside & (checkpoint > 0))
