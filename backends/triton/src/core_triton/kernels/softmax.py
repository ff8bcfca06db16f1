"""The running softmax of attention, in base 2: one tile of keys after the other."""

import triton
import triton.language as tl

__all__ = ["LN2", "LOG2E", "finish", "join_sink", "online", "share_of_tiles"]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def share_of_tiles(begin, end, BLOCK_N: tl.constexpr):
    """[first, last) of the keys that this program of the grid's axis 2 takes of [begin, end), in whole tiles."""
    begin = begin // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    share = tl.cdiv(tiles, tl.num_programs(2)) * BLOCK_N
    first = begin + tl.program_id(2) * share
    return first, tl.minimum(first + share, end)


@triton.jit
def online(logits, peak, total):
    """One tile more: (weights, factor of what was summed before, new peak, new total).

    `logits` are in base 2, -inf where a key is not seen; a row that has seen no key yet keeps peak -inf, total 0.
    """
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(logits - shift[:, None])
    factor = tl.exp2(peak - shift)
    return weights, factor, new_peak, total * factor + tl.sum(weights, 1)


@triton.jit
def join_sink(sink, peak, total):
    """A logit without a value joins: (factor of what was summed, new peak, new total)."""
    new_peak = tl.maximum(peak, sink)
    factor = tl.exp2(peak - new_peak)
    return factor, new_peak, total * factor + tl.exp2(sink - new_peak)


@triton.jit
def finish(peak, total):
    """(what to divide the sum by, natural log of the denominator): 1 and -inf where no key was seen.

    A total that is no number stays one: it must not pass for a part without keys.
    """
    unseen = total == 0
    divisor = tl.where(unseen, 1.0, total)
    return divisor, tl.where(unseen, float("-inf"), (peak + tl.log2(divisor)) * LN2)
