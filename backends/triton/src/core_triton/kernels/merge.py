"""Joins attention over disjoint sets of keys."""

import triton
import triton.language as tl

__all__ = ["merge_kernel"]


@triton.jit
def merge_kernel(
    outs,
    lses,
    sinks,
    out,
    lse,
    num_rows,
    num_parts,
    heads,
    DIM: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows). outs [num_parts, num_rows, DIM], lses [num_parts, num_rows]; row = token * heads + head.

    Args:
        PARTS: At least num_parts, a power of two.
        BLOCK: At least DIM, a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    parts, dims = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    logs = tl.load(lses + parts.to(tl.int64) * num_rows + row, mask=parts < num_parts, other=float("-inf"))
    peak = tl.max(logs, 0)
    if SINKS:
        sink = tl.load(sinks + row % heads)
        peak = tl.maximum(peak, sink)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(logs - shift)
    total = tl.sum(weights, 0)
    if SINKS:
        total += tl.exp(sink - shift)
    # A part without keys may hold anything and is not read.
    values = tl.load(
        outs + (parts.to(tl.int64) * num_rows + row)[:, None] * DIM + dims[None, :],
        mask=(weights != 0)[:, None] & (dims < DIM)[None, :],
        other=0.0,
    ).to(tl.float32)
    divisor = tl.where(total == 0, 1.0, total)
    joined = tl.sum(values * weights[:, None], 0) / divisor
    tl.store(out + row * DIM + dims, joined.to(out.dtype.element_ty), mask=dims < DIM)
    if LSE:
        tl.store(lse + row, tl.where(total == 0, float("-inf"), shift + tl.log(divisor)))
