"""rejection_sample: which drafts stay, and the token after them."""

import triton
import triton.language as tl

from core_triton.kernels.philox import gumbel, uniform

__all__ = ["accept_kernel", "finish_kernel", "recover_kernel", "row_facts_kernel"]


@triton.jit
def row_facts_kernel(
    logits,
    temperature,
    num_drafts,
    largests,
    sums,
    best_ids,
    steps,
    vocab,
    logits_stride,
    step_stride,
    BLOCK: tl.constexpr,
):
    """Largest logit, its lowest id, the sum of exp(z - largest z). Grid (rows, steps); steps past the drafts rest."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    if step > tl.load(num_drafts + row):
        return
    logits += row * logits_stride + step.to(tl.int64) * step_stride
    heat = tl.maximum(tl.load(temperature + row), 1e-5)
    largest = float("-inf")
    total = 0.0
    best = 0
    for begin in range(0, vocab, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        raw = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        here = tl.max(raw, axis=0)
        best = tl.where(here > largest, begin + tl.argmax(raw, axis=0), best)
        new = tl.maximum(largest, here)
        # Before anything finite was seen there is nothing to rescale, and the difference would be NaN.
        total = tl.where(largest > float("-inf"), total * tl.exp((largest - new) / heat), 0.0)
        shifted = tl.where(new > float("-inf"), (raw - new) / heat, float("-inf"))
        total += tl.sum(tl.exp(shifted), axis=0)
        largest = new
    place = row * (steps + 1) + step
    tl.store(largests + place, largest)
    tl.store(sums + place, total)
    tl.store(best_ids + place, best)


@triton.jit
def accept_kernel(
    logits,
    draft_ids,
    num_drafts,
    temperature,
    seeds,
    positions,
    draft_probs,
    largests,
    sums,
    best_ids,
    accepted,
    steps,
    logits_stride,
    step_stride,
    draft_stride,
    probs_stride,
    probs_step_stride,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many drafts stay: those before the first that is refused. Grid (rows). BLOCK is at least `steps`."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    real = step < tl.load(num_drafts + row)
    draft = tl.maximum(tl.load(draft_ids + row * draft_stride + step, mask=real, other=0), 0)
    heat = tl.load(temperature + row)
    place = row * (steps + 1) + step
    largest = tl.load(largests + place, mask=real, other=0.0)
    raw = tl.load(logits + row * logits_stride + step.to(tl.int64) * step_stride + draft, mask=real, other=0.0)
    p = tl.exp((raw - largest) / tl.maximum(heat, 1e-5)) / tl.load(sums + place, mask=real, other=1.0)
    u = uniform(tl.load(seeds + row), tl.load(positions + row) + step, draft, 1)
    if HAS_PROBS:
        u *= tl.load(
            draft_probs + row * probs_stride + step.to(tl.int64) * probs_step_stride + draft, mask=real, other=0.0
        )
    likely = draft == tl.load(best_ids + place, mask=real, other=-1)
    stays = real & tl.where(heat > 0, u < p, likely)
    tl.store(accepted + row, tl.min(tl.where(stays, BLOCK, step), axis=0))


@triton.jit
def recover_kernel(
    logits,
    draft_ids,
    num_drafts,
    temperature,
    seeds,
    positions,
    draft_probs,
    largests,
    sums,
    accepted,
    best_scores,
    best_tokens,
    rests,
    steps,
    vocab,
    logits_stride,
    step_stride,
    draft_stride,
    probs_stride,
    probs_step_stride,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For a block of the vocabulary: the best draws from the target and from max(p - q, 0), and the sum of that.

    Grid (rows, blocks). `best_scores` and `best_tokens` are [rows, 2, blocks]: the remainder's first.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    step = tl.load(accepted + row)
    heat = tl.load(temperature + row)
    if heat <= 0:
        return
    heat = tl.maximum(heat, 1e-5)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    raw = tl.load(
        logits + row * logits_stride + step.to(tl.int64) * step_stride + ids, mask=inside, other=float("-inf")
    )
    seed = tl.load(seeds + row)
    position = tl.load(positions + row) + step
    place = row * 2 * blocks + block
    refused = step < tl.load(num_drafts + row)
    fresh = raw / heat
    if refused:
        facts = row * (steps + 1) + step
        p = tl.exp((raw - tl.load(largests + facts)) / heat) / tl.load(sums + facts)
        if HAS_PROBS:
            q = tl.load(
                draft_probs + row * probs_stride + step.to(tl.int64) * probs_step_stride + ids, mask=inside, other=0.0
            )
            rest = tl.maximum(p - q, 0.0)
        else:
            token = tl.maximum(tl.load(draft_ids + row * draft_stride + step), 0)
            rest = tl.where(ids == token, 0.0, p)
        noise = gumbel(seed, position, ids, 2)
        score = tl.where(rest > 0, tl.log(rest) + noise, float("-inf"))
        tl.store(best_scores + place, tl.max(score, axis=0))
        tl.store(best_tokens + place, block * BLOCK + tl.argmax(score, axis=0))
        tl.store(rests + row * blocks + block, tl.sum(rest, axis=0))
        fresh += noise
    else:
        fresh += gumbel(seed, position, ids, 0)
    tl.store(best_scores + place + blocks, tl.max(fresh, axis=0))
    tl.store(best_tokens + place + blocks, block * BLOCK + tl.argmax(fresh, axis=0))


@triton.jit
def finish_kernel(
    draft_ids,
    num_drafts,
    temperature,
    best_ids,
    accepted,
    best_scores,
    best_tokens,
    rests,
    tokens,
    counts,
    steps,
    num_blocks,
    vocab,
    draft_stride,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """The accepted drafts and the token after them, -1 past it. Grid (rows). STEPS is more than `steps`."""
    row = tl.program_id(0).to(tl.int64)
    stay = tl.load(accepted + row)
    last = tl.load(best_ids + row * (steps + 1) + stay)
    if tl.load(temperature + row) > 0:
        blocks = tl.arange(0, BLOCK)
        inside = blocks < num_blocks
        refused = stay < tl.load(num_drafts + row)
        rest = tl.sum(tl.load(rests + row * num_blocks + blocks, mask=inside & refused, other=0.0), axis=0)
        # Where rounding left nothing of the remainder, the target itself is drawn from.
        half = tl.where(refused & (rest > 0), 0, num_blocks)
        place = row * 2 * num_blocks + half
        score = tl.load(best_scores + place + blocks, mask=inside, other=float("-inf"))
        last = tl.load(best_tokens + place + tl.argmax(score, axis=0))
    step = tl.arange(0, STEPS)
    draft = tl.load(draft_ids + row * draft_stride + step, mask=step < stay, other=-1)
    token = tl.where(step == stay, tl.minimum(last, vocab - 1), draft)
    tl.store(tokens + row * (steps + 1) + step, token, mask=step <= steps)
    tl.store(counts + row, stay + 1)
