"""Numbers in 8 bits and fewer, decoded and encoded bit by bit: the same on every chip, whatever it has of its own."""

import triton
import triton.language as tl

__all__ = [
    "decode_e4m3",
    "encode_e4m3",
    "exact_int8",
    "power_of_two",
    "round_even",
    "scale_value",
    "without_minus_zero",
]


@triton.jit
def decode_e4m3(bits, FNUZ: tl.constexpr):
    """Bytes of e4m3 as float16, which holds every one of them exactly; NaN comes out as a number."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
    # The exponent's bias is 15 here, 7 there (8 in the fnuz form).
    return half * (128.0 if FNUZ else 256.0)


@triton.jit
def encode_e4m3(x):
    """float32 as bytes of e4m3fn: nearest, ties to even, what is too large as 448. There is no minus zero."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = round_even(size * 512.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    return tl.where((x < 0) & (code > 0), code | 0x80, code).to(tl.uint8)


@triton.jit
def round_even(x):
    """The nearest whole number of a float32 below 2^22, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def exact_int8(x, largest):
    """Rows in int8 and their scale: largest magnitude / 127, values rounded half to even.

    Args:
        x: [rows, columns], float32.
        largest: [rows], float32.
    """
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    safe = tl.maximum(scale, 1.1754944e-38)
    q = round_even(tl.div_rn(x, tl.broadcast_to(safe[:, None], x.shape)))
    return tl.minimum(tl.maximum(q, -127.0), 127.0).to(tl.int8), scale


@triton.jit
def power_of_two(exponent):
    """Scales in UE8M0: 2^(e - 127), float32; 255 is NaN."""
    wide = exponent.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_value(scale):
    """A scale in float32, whether a number or the byte of a UE8M0 exponent."""
    if scale.dtype == tl.uint8:
        return power_of_two(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def without_minus_zero(bits):
    """Bytes of e4m3fn that can be read as e4m3fnuz, where they count half; minus zero would be NaN there."""
    return tl.where(bits == 0x80, 0, bits).to(tl.uint8)
