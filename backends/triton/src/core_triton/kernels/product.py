"""One tile of a product x @ weight.T, for every form in which weights and activations are stored."""

import triton
import triton.language as tl

from core_triton.kernels.formats import decode_e4m3, scale_value, without_minus_zero

__all__ = ["tile_product"]


@triton.jit
def tile_product(
    x,
    x_rows,
    row_mask,
    x_scale,
    x_scale_rows,
    weight,
    weight_rows,
    column_mask,
    scale,
    scale_rows,
    zero,
    k_begin,
    k_end,
    FORM: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    FNUZ: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N], float32: the sum over [k_begin, k_end) with every scale along K applied.

    Scales of whole rows are the caller's, after the sum.

    Args:
        x: Activations; row m begins at x + x_rows[m].
        x_rows: [BLOCK_M], int64.
        row_mask: [BLOCK_M].
        x_scale: float32; row m begins at x_scale + x_scale_rows[m].
        weight: Row n begins at weight + weight_rows[n] (int64), contiguous along K; int4: two elements a byte.
        column_mask: [BLOCK_N].
        scale: Of the weight; row n begins at scale + scale_rows[n].
        zero: int4: as scale, uint8.
        k_begin: A multiple of BLOCK_K.
        FORM: "dense"; "fp8" (x in 8 bits too); "fp8_cast" and "fp8_bits" (x is wide; the chip's own conversion, or
            bytes that are decoded here); "int8" (x too); "int4".
        X_GROUP: Elements along K that share a scale of x; 0 is the whole row.
        W_GROUP: As X_GROUP, of the weight. BLOCK_K divides both.
        FNUZ: Whether the weight is in the fnuz form of e4m3.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if FORM == "int8" else tl.float32)
    for k0 in range(k_begin, k_end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(x + x_rows[:, None] + k[None, :], mask=row_mask[:, None] & (k < k_end)[None, :], other=0.0)
        if FORM == "int4":
            pair = k0 // 2 + tl.arange(0, BLOCK_K // 2)
            inside = column_mask[:, None] & (pair < (k_end + 1) // 2)[None, :]
            packed = tl.load(weight + weight_rows[:, None] + pair[None, :], mask=inside, other=0.0)
            middle = tl.load(zero + scale_rows + k0 // W_GROUP, mask=column_mask, other=0.0)
            codes = tl.interleave(packed & 15, packed >> 4).to(tl.float32) - middle.to(tl.float32)[:, None]
            b = tl.trans(codes.to(a.dtype))
        else:
            inside = (k < k_end)[:, None] & column_mask[None, :]
            b = tl.load(weight + weight_rows[None, :] + k[:, None], mask=inside, other=0.0)
        if FORM == "fp8":
            if FNUZ:
                a = without_minus_zero(a).to(tl.float8e4b8, bitcast=True)
        elif FORM == "fp8_bits":
            b = decode_e4m3(b, FNUZ).to(a.dtype)
        elif FORM == "fp8_cast":
            b = b.to(a.dtype)
        elif FORM == "dense" and a.dtype != b.dtype:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        if X_GROUP > 0 or W_GROUP > 0:
            part = tl.dot(a, b, input_precision="ieee")
            if W_GROUP > 0:
                s = tl.load(scale + scale_rows + k0 // W_GROUP, mask=column_mask, other=0.0)
                part *= scale_value(s)[None, :]
            if X_GROUP > 0:
                s = tl.load(x_scale + x_scale_rows + k0 // X_GROUP, mask=row_mask, other=0.0)
                part *= s[:, None]
            acc += part
        elif FORM == "int8":
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc.to(tl.float32)
