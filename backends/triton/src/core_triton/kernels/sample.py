"""sample: thresholds of the filters without a sort, then a draw over blocks of the vocabulary; token masks."""

import triton
import triton.language as tl

from core_triton.kernels.philox import gumbel

__all__ = ["best_kernel", "bitmask_kernel", "draw_kernel", "threshold_kernel"]

_LEAST_KEY: tl.constexpr = tl.constexpr(-2139095041)
"""Key of -inf."""


@triton.jit
def _key(z):
    """int32 in the order of the floats; both zeros are one."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _least_key(
    logits, vocab, heat, largest, low, high, target, PROBS: tl.constexpr, BLOCK: tl.constexpr, CUTS: tl.constexpr
):
    """(The least key in [low, high] above which less than `target` lies, what lies above it).

    What lies above a key is how many tokens have a larger one, or with PROBS the sum of their exp(z - largest). Nothing
    lies above `high`. Each reading of the row cuts the range of keys in CUTS.
    """
    first = low.to(tl.int64)
    last = high.to(tl.int64)
    above = 0.0
    share = tl.arange(0, CUTS).to(tl.int64) + 1
    while first < last:
        cuts = first + (last - first) * share // CUTS
        keys = cuts.to(tl.int32)
        mass = tl.zeros((CUTS,), tl.float32)
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            z = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat
            weight = tl.exp(z - largest) if PROBS else tl.where(ids < vocab, 1.0, 0.0)
            mass += tl.sum(tl.where(_key(z)[None, :] > keys[:, None], weight[None, :], 0.0), axis=1)
        first = tl.maximum(first, tl.max(tl.where(mass < target, first, cuts + 1), axis=0))
        last = tl.min(tl.where(mass < target, cuts, last), axis=0)
        above = tl.max(tl.where(mass < target, mass, 0.0), axis=0)
    return last.to(tl.int32), above


@triton.jit
def threshold_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    last_ties,
    vocab,
    logits_stride,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    CUTS: tl.constexpr,
):
    """For each row the key above which all tokens are kept, and the last id that is kept of those with the key itself.

    Grid (rows). Kept tokens are a head of the falling order with lower ids first among equals, so two numbers tell it.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    heat = tl.load(temperature + row)
    if heat <= 0:
        return
    heat = tl.maximum(heat, 1e-5)
    largest = float("-inf")
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        z = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat
        largest = tl.maximum(largest, tl.max(z, axis=0))
    top = _key(largest)
    low = tl.minimum(top, _LEAST_KEY)
    # How many tokens with the key itself are kept; those of -inf are never drawn.
    ties = 2147483647.0
    if HAS_TOP_K:
        k = tl.load(top_k + row)
        if (k > 0) & (k < vocab):
            low, above = _least_key(logits, vocab, heat, largest, low, top, k.to(tl.float32), False, BLOCK, CUTS)
            ties = k.to(tl.float32) - above
    if HAS_TOP_P:
        p = tl.load(top_p + row)
        if p < 1:
            # All that the first filter keeps: what is above its key, and its share of those with the key itself.
            total = 0.0
            equal = 0.0
            for begin in range(0, vocab, BLOCK):
                ids = begin + tl.arange(0, BLOCK)
                z = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat
                key = _key(z)
                total += tl.sum(tl.where(key > low, tl.exp(z - largest), 0.0), axis=0)
                equal += tl.sum(tl.where((key == low) & (ids < vocab), 1.0, 0.0), axis=0)
            total += tl.minimum(ties, equal) * tl.exp(_value(low) - largest)
            wanted = tl.maximum(p * total, 1e-30)
            edge, above = _least_key(logits, vocab, heat, largest, low, top, wanted, True, BLOCK, CUTS)
            needed = tl.maximum(tl.ceil((wanted - above) / tl.exp(_value(edge) - largest)), 1.0)
            ties = tl.where(edge == low, tl.minimum(needed, ties), needed)
            low = edge
    if HAS_MIN_P:
        # In falling order it only cuts the tail: a key alone says where.
        share = tl.load(min_p + row)
        for begin in range(0, vocab, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            z = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat
            stays = (tl.exp(z - largest) >= share) | (ids >= vocab)
            cut = tl.max(tl.where(stays, _LEAST_KEY, _key(z)), axis=0)
            ties = tl.where((cut >= low) & (cut > _LEAST_KEY), 0.0, ties)
            low = tl.maximum(low, cut)
    tl.store(keys + row, low)
    last = -1
    seen = 0.0
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        z = tl.load(logits + ids, mask=ids < vocab, other=float("-inf")) / heat
        equal = tl.where((_key(z) == low) & (ids < vocab), 1.0, 0.0)
        rank = seen + tl.cumsum(equal, axis=0)
        last = tl.maximum(last, tl.max(tl.where((equal > 0) & (rank <= ties), ids, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    tl.store(last_ties + row, last)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    seeds,
    positions,
    keys,
    last_ties,
    best_scores,
    best_ids,
    vocab,
    logits_stride,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of a block of the vocabulary and its lowest id. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row * logits_stride + ids, mask=ids < vocab, other=float("-inf"))
    heat = tl.load(temperature + row)
    score = raw
    if heat > 0:
        z = raw / tl.maximum(heat, 1e-5)
        score = z + gumbel(tl.load(seeds + row), tl.load(positions + row), ids, 0)
        if FILTERED:
            key = _key(z)
            limit = tl.load(keys + row)
            kept = (key > limit) | ((key == limit) & (ids <= tl.load(last_ties + row)))
            score = tl.where(kept, score, float("-inf"))
    best = tl.argmax(score, axis=0)
    place = row * tl.num_programs(1) + block
    tl.store(best_scores + place, tl.max(score, axis=0))
    tl.store(best_ids + place, block * BLOCK + best)


@triton.jit
def best_kernel(best_scores, best_ids, out, num_blocks, vocab, BLOCK: tl.constexpr):
    """The best of the blocks, the first among equals. Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCK)
    score = tl.load(best_scores + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    best = tl.argmax(score, axis=0)
    tl.store(out + row, tl.minimum(tl.load(best_ids + row * num_blocks + best), vocab - 1))


@triton.jit
def bitmask_kernel(logits, bitmask, vocab, logits_stride, bitmask_stride, BLOCK: tl.constexpr):
    """-inf where a token's bit is 0. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    word = tl.load(bitmask + row * bitmask_stride + ids // 32, mask=inside, other=-1)
    forbidden = ((word >> (ids % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + ids, float("-inf"), mask=inside & forbidden)
