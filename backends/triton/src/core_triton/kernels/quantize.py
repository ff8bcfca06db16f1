"""Rows of activations in 8 bits, with the scales that their consumer asks for."""

import triton
import triton.language as tl

from core_triton.kernels.formats import encode_e4m3, exact_int8

__all__ = ["quantize_rows_kernel", "store_quantized"]


@triton.jit
def store_quantized(y, rows, columns, inside, row_mask, q, q_scale, dim, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    """Writes rows y [R, BLOCK], float32, as int8_row, fp8_row or fp8_block128.

    Args:
        rows: [R], int64.
        columns: [BLOCK].
        inside: [R, BLOCK]; y is 0 outside.
        q: [num_rows, dim], int8, or the bytes of e4m3fn; contiguous.
        q_scale: [num_rows, 1], or [num_rows, ceil(dim / 128)]; float32, contiguous.
    """
    place = q + rows[:, None] * dim + columns[None, :]
    if FORMAT == "int8_row":
        codes, scale = exact_int8(y, tl.max(tl.abs(y), axis=1))
        tl.store(place, codes, mask=inside)
        tl.store(q_scale + rows, scale, mask=row_mask)
    elif FORMAT == "fp8_row":
        scale = tl.max(tl.abs(y), axis=1) / 448.0
        tl.store(place, encode_e4m3(y / tl.maximum(scale, 1.1754944e-38)[:, None]), mask=inside)
        tl.store(q_scale + rows, scale, mask=row_mask)
    else:
        tl.static_assert(FORMAT == "fp8_block128")
        blocks: tl.constexpr = BLOCK // 128
        tiles = tl.reshape(y, (y.shape[0], blocks, 128))
        scale = tl.max(tl.abs(tiles), axis=2) / 448.0
        codes = encode_e4m3(tiles / tl.maximum(scale, 1.1754944e-38)[:, :, None])
        tl.store(place, tl.reshape(codes, (y.shape[0], BLOCK)), mask=inside)
        count = tl.cdiv(dim, 128)
        block = tl.arange(0, blocks)
        to = q_scale + rows[:, None] * count + block[None, :]
        tl.store(to, scale, mask=row_mask[:, None] & (block < count)[None, :])


@triton.jit
def quantize_rows_kernel(
    x, q, q_scale, num_rows, dim, x_stride, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of x [num_rows, dim] in a format of activations. Grid (programs of ROWS rows)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    row_mask = rows < num_rows
    inside = row_mask[:, None] & (columns < dim)[None, :]
    y = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0).to(tl.float32)
    store_quantized(y, rows, columns, inside, row_mask, q, q_scale, dim, FORMAT, BLOCK)
