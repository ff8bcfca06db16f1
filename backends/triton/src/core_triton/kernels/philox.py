"""The random numbers that every backend shares, as `core.backend.philox` defines them: Philox4x32-10."""

import triton
import triton.language as tl

__all__ = ["gumbel", "uniform", "uniform_tail"]


@triton.jit
def _first_word(seed, position, index, STREAM: tl.constexpr):
    """First output word of counter (position, index, stream, 0), uint32.

    Args:
        seed: int64 scalar, the key.
        position: int32 scalar.
        index: int32 block.
    """
    k0 = seed.to(tl.uint64).to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    c1 = index.to(tl.uint32)
    c0 = tl.zeros_like(c1) + position.to(tl.uint32)
    c2 = tl.zeros_like(c1) + STREAM
    c3 = tl.zeros_like(c1)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low0 = c0 * 0xD2511F53
        c0 = high1 ^ c1 ^ k0
        c1 = c2 * 0xCD9E8D57
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0


@triton.jit
def uniform(seed, position, index, STREAM: tl.constexpr):
    """Draws in (0, 1), float32: 23 bits and a half, exact."""
    word = _first_word(seed, position, index, STREAM) >> 9
    return (word.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 8388608.0)


@triton.jit
def uniform_tail(seed, position, index, STREAM: tl.constexpr):
    """The same draws u and 1 - u, both exact."""
    word = (_first_word(seed, position, index, STREAM) >> 9).to(tl.int32)
    u = (word.to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    tail = ((8388607 - word).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return u, tail


@triton.jit
def gumbel(seed, position, index, STREAM: tl.constexpr):
    """-log(-log(u)), float32.

    The largest of many draws has u next to 1, where a chip's quick logarithm has no digit left: there -log(u) is
    taken from its series in 1 - u.
    """
    u, tail = uniform_tail(seed, position, index, STREAM)
    series = 1.0 / 7.0 + tail * 0.125
    series = 1.0 / 6.0 + tail * series
    series = 0.2 + tail * series
    series = 0.25 + tail * series
    series = 1.0 / 3.0 + tail * series
    series = 0.5 + tail * series
    series = tail + tail * tail * series
    return -tl.log(tl.where(tail < 0.125, series, -tl.log(u)))
