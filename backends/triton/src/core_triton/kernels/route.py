"""route: the experts of each token, chosen without a sort."""

import triton
import triton.language as tl

__all__ = ["route_kernel"]


@triton.jit
def route_kernel(
    logits,
    bias,
    weights,
    ids,
    logits_stride,
    SCORING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALING: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Grid (tokens). The largest score is taken TOP_K times: of equals the lowest id, as `tl.argmax` takes it.

    Args:
        weights: [tokens, TOP_K], float32.
        ids: [tokens, TOP_K], int32.
        BLOCK: At least NUM_EXPERTS; BLOCK_GROUPS and BLOCK_K likewise.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < NUM_EXPERTS
    row = tl.load(logits + token * logits_stride + expert, mask=real, other=float("-inf"))
    if SCORING == "softmax":
        shifted = tl.exp(row - tl.max(row, axis=0))
        scores = shifted / tl.sum(shifted, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-row))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0)
    choice = tl.where(real, choice, float("-inf"))
    if NUM_GROUPS > TOP_GROUPS:
        size: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
        group_of = expert // size
        group = tl.arange(0, BLOCK_GROUPS)
        worth = tl.full((BLOCK_GROUPS,), float("-inf"), tl.float32)
        for g in tl.static_range(NUM_GROUPS):
            members = tl.where(group_of == g, choice, float("-inf"))
            best = tl.max(members, axis=0)
            if HAS_BIAS and size > 1:
                first = tl.argmax(members, axis=0)
                best += tl.max(tl.where(expert == first, float("-inf"), members), axis=0)
            worth = tl.where(group == g, best, worth)
        stays = expert < 0
        for _ in tl.static_range(TOP_GROUPS):
            g = tl.argmax(worth, axis=0)
            stays = stays | (group_of == g)
            worth = tl.where(group == g, float("-inf"), worth)
        choice = tl.where(stays, choice, float("-inf"))
    place = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    shares = tl.zeros((BLOCK_K,), tl.float32)
    open_to = real
    for k in tl.static_range(TOP_K):
        best = tl.argmax(tl.where(open_to, choice, float("-inf")), axis=0)
        open_to = open_to & (expert != best)
        chosen = tl.where(place == k, best, chosen)
        shares = tl.where(place == k, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), shares)
    if RENORMALIZE:
        shares /= tl.maximum(tl.sum(shares, axis=0), 1.1754944e-38)
    tl.store(weights + token * TOP_K + place, shares * SCALING, mask=place < TOP_K)
    tl.store(ids + token * TOP_K + place, chosen, mask=place < TOP_K)
