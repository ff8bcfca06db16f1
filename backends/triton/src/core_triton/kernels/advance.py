"""advance: the decode state moves on, on the device."""

import triton
import triton.language as tl

__all__ = ["advance_kernel", "slots_kernel"]


@triton.jit
def advance_kernel(
    token_ids, positions, seq_lens, sampled, num_accepted, num_rows, sampled_stride, BLOCK: tl.constexpr
):
    """Ids, positions and lengths. Grid (blocks of rows)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    count = tl.load(num_accepted + rows, mask=inside, other=0)
    moved = inside & (count > 0)
    token = tl.load(sampled + rows.to(tl.int64) * sampled_stride + count - 1, mask=moved, other=0)
    tl.store(token_ids + rows, token, mask=moved)
    tl.store(positions + rows, tl.load(positions + rows, mask=moved, other=0) + count, mask=moved)
    tl.store(seq_lens + rows, tl.load(seq_lens + rows, mask=moved, other=0) + count, mask=moved)


@triton.jit
def slots_kernel(
    positions, num_accepted, table, slots, num_rows, num_blocks, table_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Slots of one cache group by the new positions; -1 where there is no block. Grid (blocks of rows)."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    moved = inside & (tl.load(num_accepted + rows, mask=inside, other=0) > 0)
    position = tl.load(positions + rows, mask=moved, other=0)
    column = position // SIZE
    known = moved & (column < num_blocks)
    block = tl.load(table + rows.to(tl.int64) * table_stride + column, mask=known, other=0)
    slot = tl.where(block != 0, block * SIZE + position % SIZE, -1)
    tl.store(slots + rows, slot, mask=moved)
