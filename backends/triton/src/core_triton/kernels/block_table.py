"""Which blocks of a cache a tile of positions lies in."""

import triton
import triton.language as tl

__all__ = ["blocks_of_tile"]


@triton.jit
def blocks_of_tile(table, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of the BLOCK_N positions from `first` on, [BLOCK_N], or a scalar where all lie in one.

    Scalars are read, and chosen from: a load for each position would take a register and a mask for each, once more in
    every layout that the blocks are wanted in.

    Args:
        table: The request's row of the block table.
        first: A multiple of BLOCK_N; the row has an entry for it.
        end: Other blocks than the first are read, and not 0, if they begin before it.
        PAGE: Tokens a block, a power of two as BLOCK_N.
    """
    if PAGE % BLOCK_N == 0:
        block = tl.load(table + first // PAGE)
    else:
        index = tl.arange(0, BLOCK_N) // PAGE
        block = tl.zeros([BLOCK_N], tl.int32)
        for i in tl.static_range(BLOCK_N // PAGE):
            at = first + i * PAGE
            block = tl.where(index == i, tl.load(table + at // PAGE, mask=at < end, other=0), block)
    return block
