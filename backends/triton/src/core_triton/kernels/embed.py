"""embed: rows of a table, dequantized on the way."""

import triton
import triton.language as tl

from core_triton.kernels.formats import decode_e4m3, scale_value

__all__ = ["embed_kernel"]


@triton.jit
def embed_kernel(
    token_ids,
    weight,
    scale,
    zero,
    out,
    dim,
    weight_stride,
    scale_stride,
    multiplier,
    FORM: tl.constexpr,
    W_GROUP: tl.constexpr,
    W_ROWS: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens, blocks of columns).

    Args:
        FORM: "dense" and "int8" (numbers as they are), "fp8_bits" or "int4", as `tile_product` means them.
        W_GROUP: Elements of a row that share a scale; 0 is the whole row.
        W_ROWS: Rows that share a row of scales; 0 where there are none.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < dim
    row = tl.load(token_ids + token).to(tl.int64)
    if FORM == "int4":
        packed = tl.load(weight + row * weight_stride + columns // 2, mask=mask, other=0)
        values = ((packed >> ((columns & 1) * 4).to(tl.uint8)) & 15).to(tl.float32)
    else:
        stored = tl.load(weight + row * weight_stride + columns, mask=mask, other=0)
        values = decode_e4m3(stored, FNUZ).to(tl.float32) if FORM == "fp8_bits" else stored.to(tl.float32)
    if W_ROWS > 0:
        place = (row // W_ROWS) * scale_stride + (columns // W_GROUP if W_GROUP > 0 else columns * 0)
        if FORM == "int4":
            values -= tl.load(zero + place, mask=mask, other=0).to(tl.float32)
        values *= scale_value(tl.load(scale + place, mask=mask, other=0))
    tl.store(out + token * dim + columns, (values * multiplier).to(out.dtype.element_ty), mask=mask)
