"""What transformers says of the tiny models, computed in the run: logits, and greedy tokens with their gaps."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from core_conformance.models import COPY_DISTANCE, NUM_TOKENS, copy_next, hf_model

__all__ = ["Golden", "copies", "golden_logits", "greedy", "prompt_of"]


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


@functools.cache
@torch.inference_mode()
def greedy(model: str, prompt: tuple[int, ...], count: int) -> Golden:
    """The greedy continuation in float32, every step from the whole sequence: no cache can be wrong."""
    net = hf_model(model, torch.float32)
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(count):
        logits = net(torch.tensor([[*prompt, *tokens]]), use_cache=False, logits_to_keep=1).logits
        best = logits[0, -1, :NUM_TOKENS].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Golden(prompt, tuple(tokens), tuple(gaps))


def copies(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the copy model must say, from its definition; the prompt is longer than the distance."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(copy_next(sequence[len(sequence) - 1 - COPY_DISTANCE]))
    return tuple(sequence[len(prompt) :])
