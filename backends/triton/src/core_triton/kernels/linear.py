"""linear: x @ weight.T + bias, whole or in shares along K that a second kernel adds up."""

import triton
import triton.language as tl

from core_triton.kernels.formats import scale_value
from core_triton.kernels.product import tile_product

__all__ = ["add_splits_kernel", "linear_kernel"]


@triton.jit
def linear_kernel(
    x,
    x_scale,
    weight,
    scale,
    zero,
    bias,
    out,
    num_rows,
    num_columns,
    depth,
    split_depth,
    x_stride,
    x_scale_stride,
    weight_stride,
    scale_stride,
    FORM: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    W_ROWS: tl.constexpr,
    X_FACTOR: tl.constexpr,
    FNUZ: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Grid (tiles, shares of K). With SPLIT `out` is [shares, num_rows, num_columns], float32, and bias is left out.

    Args:
        split_depth: Elements along K of a share, a multiple of BLOCK_K.
        scale_stride: Between rows of scales (0: one for all).
        W_ROWS: Rows of the weight that share a row of scales; 0 where the weight has no scales.
        X_FACTOR: What the scales of x are multiplied by; 0 where x has none.
        GROUP_M: Tiles down that are worked on before the next column of tiles: they share the weight in cache.
    """
    tile = tl.program_id(0)
    share = tl.program_id(1)
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    band = tile // (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    inner = tile % (GROUP_M * tiles_n)
    rows = (band * GROUP_M + inner % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (inner // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = rows < num_rows
    column_mask = columns < num_columns
    wide_rows = rows.to(tl.int64)
    scale_rows = (columns // W_ROWS) * scale_stride if W_ROWS > 0 else columns
    k_begin = share * split_depth
    k_end = tl.minimum(k_begin + split_depth, depth)
    acc = tile_product(
        x,
        wide_rows * x_stride,
        row_mask,
        x_scale,
        wide_rows * x_scale_stride,
        weight,
        columns.to(tl.int64) * weight_stride,
        column_mask,
        scale,
        scale_rows,
        zero,
        k_begin,
        k_end,
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
            acc *= tl.load(x_scale + wide_rows * x_scale_stride, mask=row_mask, other=0)[:, None]
        if X_FACTOR != 1:
            acc *= X_FACTOR
    if W_ROWS > 0 and W_GROUP == 0:
        acc *= scale_value(tl.load(scale + scale_rows, mask=column_mask, other=0))[None, :]
    if HAS_BIAS and not SPLIT:
        acc += tl.load(bias + columns, mask=column_mask, other=0).to(tl.float32)[None, :]
    place = wide_rows * num_columns
    if SPLIT:
        place += share.to(tl.int64) * num_rows * num_columns
    to = out + place[:, None] + columns[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def add_splits_kernel(parts, bias, out, num_rows, num_columns, num_splits, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums [num_splits, num_rows, num_columns] in order, adds the bias and rounds once. Grid (num_rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(num_splits):
        acc += tl.load(parts + (split * num_rows + row) * num_columns + columns, mask=mask, other=0)
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * num_columns + columns, acc.to(out.dtype.element_ty), mask=mask)
