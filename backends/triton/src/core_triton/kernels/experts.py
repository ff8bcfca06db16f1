"""experts: pairs of token and expert in the order of the experts, and products over tiles of one expert each.

Everything has a size that the host knows: a tile that no expert needs has no expert, and its program ends at once.
"""

import triton
import triton.language as tl

from core_triton.kernels.activation import activate
from core_triton.kernels.formats import scale_value
from core_triton.kernels.product import tile_product

__all__ = ["combine_kernel", "count_kernel", "order_kernel", "pair_product_kernel"]


@triton.jit
def count_kernel(ids, counts, num_pairs, first_expert, BLOCK: tl.constexpr):
    """Pairs of each expert of this rank. Grid (experts)."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        here = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert + first_expert
        found += here.to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit
def order_kernel(
    ids,
    counts,
    pairs,
    tile_experts,
    num_pairs,
    num_experts,
    first_expert,
    num_tiles,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Pairs by expert, each expert's in rising order and filled up to whole tiles with `num_pairs`. Grid (experts + 1).

    The last program marks the tiles that are left over with -1.

    Args:
        pairs: [num_tiles * TILE], int32.
        tile_experts: [num_tiles], int32.
    """
    expert = tl.program_id(0)
    each = tl.arange(0, BLOCK_EXPERTS)
    tiles = (tl.load(counts + each, mask=each < num_experts, other=0) + TILE - 1) // TILE
    first = tl.sum(tl.where(each < expert, tiles, 0), axis=0)
    if expert == num_experts:
        for begin in range(first, num_tiles, BLOCK):
            tile = begin + tl.arange(0, BLOCK)
            tl.store(tile_experts + tile, -1, mask=tile < num_tiles)
    else:
        mine = tl.sum(tl.where(each == expert, tiles, 0), axis=0)
        for begin in range(0, mine, BLOCK):
            tile = begin + tl.arange(0, BLOCK)
            tl.store(tile_experts + first + tile, expert, mask=tile < mine)
        seen = 0
        for begin in range(0, num_pairs, BLOCK):
            pair = begin + tl.arange(0, BLOCK)
            here = tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert + first_expert
            rank = seen + tl.cumsum(here.to(tl.int32), axis=0) - 1
            tl.store(pairs + first * TILE + rank, pair, mask=here)
            seen += tl.sum(here.to(tl.int32), axis=0)
        for begin in range(seen, mine * TILE, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            tl.store(pairs + first * TILE + place, num_pairs, mask=place < mine * TILE)


@triton.jit
def pair_product_kernel(
    x,
    x_scale,
    weight,
    scale,
    zero,
    pairs,
    tile_experts,
    out,
    num_pairs,
    num_columns,
    depth,
    x_stride,
    x_scale_stride,
    weight_stride,
    weight_expert_stride,
    scale_stride,
    scale_expert_stride,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    W_ROWS: tl.constexpr,
    X_FACTOR: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile of pairs times the weight of their expert. Grid (tiles of pairs, tiles of columns).

    GATED: x has a row a token, the weight gate and up rows; `out` is activation(gate) * up [num_pairs, num_columns].
    Otherwise x has a row a pair, and `out` is the product. Gate and up rows alternate in a tile of the weight, so that
    both halves of a column's result lie in one thread.

    Args:
        num_columns: Of `out`.
        W_ROWS: As in `linear_kernel`; so are the others.
    """
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    row_mask = pair < num_pairs
    rows = (pair // TOP_K if GATED else pair).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        column = tl.program_id(1) * (BLOCK_N // 2) + lane // 2
        weight_rows = column + (lane % 2) * num_columns
    else:
        column = tl.program_id(1) * BLOCK_N + lane
        weight_rows = column
    column_mask = column < num_columns
    scale += expert.to(tl.int64) * scale_expert_stride
    scale_rows = (weight_rows // W_ROWS) * scale_stride if W_ROWS > 0 else weight_rows
    acc = tile_product(
        x,
        rows * x_stride,
        row_mask,
        x_scale,
        rows * x_scale_stride,
        weight + expert.to(tl.int64) * weight_expert_stride,
        weight_rows.to(tl.int64) * weight_stride,
        column_mask,
        scale,
        scale_rows,
        zero + expert.to(tl.int64) * scale_expert_stride,
        0,
        depth,
        FORM,
        X_GROUP,
        W_GROUP,
        FNUZ,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if X_FACTOR > 0:
        if X_GROUP == 0:
            acc *= tl.load(x_scale + rows * x_scale_stride, mask=row_mask, other=0)[:, None]
        if X_FACTOR != 1:
            acc *= X_FACTOR
    if W_ROWS > 0 and W_GROUP == 0:
        acc *= scale_value(tl.load(scale + scale_rows, mask=column_mask, other=0))[None, :]
    to = out + pair.to(tl.int64)[:, None] * num_columns
    if GATED:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        columns = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        result = (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty)
        tl.store(to + columns[None, :], result, mask=row_mask[:, None] & (columns < num_columns)[None, :])
    else:
        tl.store(to + column[None, :], acc.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def combine_kernel(parts, weights, ids, out, num_experts, first_expert, dim, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Each token's sum of its experts' results times their weights; other ranks' are nothing. Grid (tokens, blocks).

    Args:
        parts: [tokens * TOP_K, dim]; rows of other ranks' experts were never written.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < dim
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        local = tl.load(ids + token * TOP_K + k) - first_expert
        mine = (local >= 0) & (local < num_experts)
        part = tl.load(parts + (token * TOP_K + k) * dim + columns, mask=inside & mine, other=0).to(tl.float32)
        acc += part * tl.load(weights + token * TOP_K + k)
    tl.store(out + token * dim + columns, acc.to(out.dtype.element_ty), mask=inside)
