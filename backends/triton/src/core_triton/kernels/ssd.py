"""State-space duality of Mamba-2, token by token."""

import triton
import triton.language as tl

from core_triton.kernels.states import source_slot, target_slots

__all__ = ["ssd_kernel"]


@triton.jit
def ssd_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    plane,
    out,
    starts,
    state_slots,
    num_accepted,
    checkpoints,
    num_slots,
    dt_min,
    dt_max,
    x_stride,
    x_head_stride,
    dt_stride,
    b_stride,
    b_group_stride,
    c_stride,
    c_group_stride,
    slot_stride,
    head_stride,
    row_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    CHECKPOINTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (requests, heads, blocks of BLOCK_P rows); `out` is contiguous, [tokens, heads, HEAD_DIM].

    A program keeps its rows of the state to itself: no other one reads or writes them.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    heads, group = tl.num_programs(1), head // GROUP
    rows, columns = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    p_mask, n_mask = rows < HEAD_DIM, columns < STATE_DIM
    both = p_mask[:, None] & n_mask[None, :]
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    if count <= 0:
        return
    source = source_slot(state_slots, num_accepted, request, table_stride)
    part = plane + head * head_stride + (rows * row_stride)[:, None] + columns[None, :]
    state = tl.load(part + source * slot_stride, mask=both & (source > 0), other=0.0).to(tl.float32)
    rate, skip, offset = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    for index in range(count):
        token = (start + index).to(tl.int64)
        raw = tl.load(dt + token * dt_stride + head) + offset
        # softplus(raw), without overflow; log(1 + e) is e where e is small.
        tail = tl.exp(-tl.abs(raw))
        step = tl.maximum(raw, 0.0) + tl.where(tail < 1e-4, tail * (1.0 - 0.5 * tail), tl.log(1.0 + tail))
        step = tl.minimum(tl.maximum(step, dt_min), dt_max)
        values = tl.load(x + token * x_stride + head * x_head_stride + rows, mask=p_mask, other=0.0).to(tl.float32)
        into = tl.load(b + token * b_stride + group * b_group_stride + columns, mask=n_mask, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_stride + group * c_group_stride + columns, mask=n_mask, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + (step * values)[:, None] * into[None, :]
        mixed = tl.sum(state * read[None, :], 1) + skip * values
        tl.store(out + (token * heads + head) * HEAD_DIM + rows, mixed.to(out.dtype.element_ty), mask=p_mask)
        slot, checkpoint = target_slots(
            state_slots, checkpoints, request, table_stride, num_slots, index, count, CHECKPOINTS
        )
        kept = state.to(plane.dtype.element_ty)
        tl.store(part + slot * slot_stride, kept, mask=both & (slot > 0))
        tl.store(part + checkpoint * slot_stride, kept, mask=both & (checkpoint > 0))
