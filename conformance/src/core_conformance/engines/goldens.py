"""What transformers says of the tiny models, computed in the run: logits, and greedy tokens with their gaps."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core_conformance.engines.models import COPY_DISTANCE, NUM_TOKENS, copy_next, hf_model
from core_conformance.tolerance import LOGIT_DELTA

__all__ = ["Golden", "Rule", "clear", "copies", "golden_logits", "greedy", "prompt_of", "prompt_that_says", "ruled"]

Rule = Callable[[Tensor, tuple[int, ...], tuple[int, ...]], Tensor]
"""(logits [vocabulary] float32, prompt, output so far) to the scores of which the largest is said."""
_CLEAR_GAP = 8 * LOGIT_DELTA


@dataclass(frozen=True)
class Golden:
    """A greedy continuation.

    Args:
        prompt: Token ids.
        tokens: What follows.
        gaps: Difference of the two largest logits before each token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@functools.cache
def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random bytes."""
    dice = random.Random(1000 * length + seed)
    return tuple(dice.randrange(256) for _ in range(length))


@torch.inference_mode()
def golden_logits(model: str, tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[len(tokens), vocabulary] float64, padding rows of the head left out."""
    logits: Tensor = hf_model(model, dtype)(torch.tensor([tokens])).logits[0, :, :NUM_TOKENS]
    return logits.double()


def greedy(model: str, prompt: tuple[int, ...], count: int) -> Golden:
    """The greedy continuation in float32, every step from the whole sequence: no cache can be wrong."""
    return ruled(model, prompt, count, _as_it_is)


@functools.cache
@torch.inference_mode()
def ruled(model: str, prompt: tuple[int, ...], count: int, rule: Rule) -> Golden:
    """The same where something else than the logits decides.

    Args:
        rule: Gets a tensor of its own; one function object for each rule, since goldens are kept.
    """
    net = hf_model(model, torch.float32)
    tokens: tuple[int, ...] = ()
    gaps: list[float] = []
    for _ in range(count):
        logits = net(torch.tensor([[*prompt, *tokens]]), use_cache=False, logits_to_keep=1).logits
        best = rule(logits[0, -1, :NUM_TOKENS], prompt, tokens).topk(2)
        tokens += (int(best.indices[0]),)
        gaps.append(float(best.values[0] - best.values[1]))
    return Golden(prompt, tokens, tuple(gaps))


def _as_it_is(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    return logits


@functools.cache
def clear(model: str, length: int, count: int, rule: Rule = _as_it_is, seed: int = 0) -> Golden:
    """A golden of which no gap is small: what a rule makes of a token behind an ambiguous one cannot be compared."""
    for attempt in range(200):
        golden = ruled(model, prompt_of(length, seed=7000 + 200 * seed + attempt), count, rule)
        if min(golden.gaps) > _CLEAR_GAP:
            return golden
    raise AssertionError(f"no prompt of {length} tokens has a continuation without small gaps")


def copies(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the copy model must say, from its definition; the prompt is longer than the distance."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(copy_next(sequence[len(sequence) - 1 - COPY_DISTANCE]))
    return tuple(sequence[len(prompt) :])


def prompt_that_says(tokens: Sequence[int]) -> tuple[int, ...]:
    """A prompt that makes the copy model say `tokens`, at most COPY_DISTANCE bytes, and then other things."""
    before = {copy_next(token): token for token in range(256)}
    ahead = tuple(before[token] for token in tokens)
    return ahead + prompt_of(COPY_DISTANCE + 1 - len(ahead), seed=4)
