"""Copies of rows by index, as words of memory: blocks in and out of a cache, blocks to blocks, tokens to slots."""

import triton
import triton.language as tl

__all__ = ["copy_rows_kernel"]


@triton.jit
def copy_rows_kernel(
    source,
    target,
    sources,
    targets,
    skips,
    width,
    source_stride,
    target_stride,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """target[targets[i]] = source[sources[i]] where skips[i] >= 0. Grid (rows, blocks of BLOCK words).

    Args:
        SOURCES: Whether there is such a list; i itself otherwise. A negative source is read as 0.
        TARGETS: As SOURCES. A negative target is written nowhere.
        SKIPS: Whether there is such a list.
    """
    row = tl.program_id(0)
    from_, to = row.to(tl.int64), row.to(tl.int64)
    if SOURCES:
        from_ = tl.maximum(tl.load(sources + row).to(tl.int64), 0)
    if TARGETS:
        to = tl.load(targets + row).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < width) & (to >= 0)
    if SKIPS:
        inside = inside & (tl.load(skips + row) >= 0)
    words = tl.load(source + from_ * source_stride + at, mask=inside, other=0)
    tl.store(target + to * target_stride + at, words, mask=inside)
