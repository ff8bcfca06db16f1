"""L3: what bends the choice of tokens (penalties, biases, masks, grammars, seeds), under every schedule.

Goldens are made by bending the logits of transformers in the same way; those with a small gap are not used, since a
token that differs there would change all that follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend.philox import GUMBEL_STREAM, gumbel
from core.exec.token_masks import mask_words
from core_conformance.checks import check
from core_conformance.engines.goldens import Golden, Rule, clear
from core_conformance.engines.models import NUM_TOKENS
from core_conformance.engines.rig import Rig, tokens_of
from core_conformance.engines.schedules import SCHEDULES, scheduled
from core_conformance.subject import Mismatch, Subject

_COUNT = 8
_RING = (3, 31, 32, 63, 64, 100, 160, 200, 255, 258)
"""Tokens of the grammar; some at the ends of mask words, one at the end of the vocabulary."""


@dataclass(frozen=True)
class _Bend:
    """Sampling parameters, and what they do to logits."""

    params: dict[str, Any]
    rule: Rule


def _penalties(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    return _penalised(logits, prompt, output, repetition=1.5, frequency=0.5, presence=0.75)


def _rewards(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    """What came comes again: tokens of the prompt, the newest one, and how often they came, all of it shows."""
    return _penalised(logits, prompt, output, repetition=0.7, frequency=-0.45, presence=-0.6)


def _penalised(
    logits: Tensor,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    *,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:
    for token in {*prompt, *output}:
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in output:
        logits[token] -= frequency
    for token in set(output):
        logits[token] -= presence
    return logits


def _bias(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    logits[7] += 1.25
    logits[99] -= 100.0
    logits[200] += 0.75
    return logits


_EVEN = tuple(range(0, 256, 2))


def _even(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    logits[1::2] = -torch.inf
    logits[256:] = -torch.inf
    return logits


def _no_bad_words(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    """Half of the tokens may not follow one of the other half."""
    if output and output[-1] % 2 == 0:
        logits[1:256:2] = -torch.inf
    logits[11] = -torch.inf
    return logits


_BAD_WORDS = ((11,), *((first, last) for first in range(0, 256, 2) for last in range(1, 256, 2)))


def _not_yet(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    """Three of four tokens would end the request, and may not be among the first five."""
    if len(output) < 5:
        logits[[token for token in range(256) if token % 4]] = -torch.inf
    return logits


_ENDS = tuple(token for token in range(256) if token % 4)


def _ring(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    kept = list(_follows(output))
    values = logits[kept]
    logits[:] = -torch.inf
    logits[kept] = values
    return logits


def _follows(output: tuple[int, ...]) -> tuple[int, ...]:
    """A grammar: one of the four tokens of the ring behind the last one."""
    start = _RING.index(output[-1]) + 1 if output and output[-1] in _RING else 0
    return tuple(_RING[(start + i) % len(_RING)] for i in range(4))


def _drawn(logits: Tensor, prompt: tuple[int, ...], output: tuple[int, ...]) -> Tensor:
    """Gumbel noise as the contract draws it: of the seed, the position and the token alone."""
    position = torch.tensor(len(prompt) + len(output))
    noise = gumbel(torch.tensor(_SEED), position, torch.arange(len(logits)), GUMBEL_STREAM)
    return logits / _TEMPERATURE + noise


_SEED, _TEMPERATURE = 4321, 0.8
_BENDS = {
    "penalties": _Bend({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.75}, _penalties),
    "rewards": _Bend({"repetition_penalty": 0.7, "frequency_penalty": -0.45, "presence_penalty": -0.6}, _rewards),
    "logit-bias": _Bend({"logit_bias": {7: 1.25, 99: -100.0, 200: 0.75}}, _bias),
    "allowed-ids": _Bend({"allowed_token_ids": _EVEN}, _even),
    "bad-words": _Bend({"bad_words_token_ids": _BAD_WORDS}, _no_bad_words),
    "min-tokens": _Bend({"stop_token_ids": _ENDS, "min_tokens": 5}, _not_yet),
    "seed": _Bend({"temperature": _TEMPERATURE, "seed": _SEED}, _drawn),
}


@check("L3/constraints", [f"{b}-{s}" for b in _BENDS for s in SCHEDULES])
def test_bent_choices(subject: Subject, variant: str) -> None:
    """Penalties, biases, lists and seeds give the golden's tokens; requests without them beside them do not notice."""
    kind = next(name for name in _BENDS if variant.startswith(name))
    bend, schedule = _BENDS[kind], variant.removeprefix(f"{kind}-")
    goldens = _goldens(subject, bend.rule)
    plain = _goldens(subject, None)
    with scheduled(subject, "llama", schedule, [*goldens, *plain]) as rig:
        expected = {}
        for bent, other in zip(goldens, plain, strict=True):
            tokens = _until(bent.tokens, bend.params.get("stop_token_ids", ()))
            expected[rig.start(bent.prompt, max_tokens=_COUNT, **bend.params)] = tokens
            expected[rig.start(other.prompt, max_tokens=_COUNT)] = other.tokens
        _must_say(rig, expected, f"{kind}, {schedule}")


class _Grammar:
    """Holds every request with an odd number to the ring, by a bitmask."""

    def constrains(self, request_id: str) -> bool:
        return int(request_id[1:]) % 2 == 1

    def allowed(self, request_id: str, output_token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        words = np.zeros(mask_words(NUM_TOKENS), dtype=np.uint32)
        for token in _follows(tuple(output_token_ids.tolist())):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)


@check("L3/structured", SCHEDULES.keys())
def test_a_grammar_under_every_schedule(subject: Subject, variant: str) -> None:
    """A mask that follows from the output so far: it is never a token late, nor a refused draft ahead."""
    goldens, plain = _goldens(subject, _ring), _goldens(subject, None)
    with scheduled(subject, "llama", variant, [*goldens, *plain], token_masks=_Grammar()) as rig:
        expected = {}
        for bent, other in zip(goldens, plain, strict=True):
            expected[rig.start(bent.prompt, max_tokens=_COUNT)] = bent.tokens
            expected[rig.start(other.prompt, max_tokens=_COUNT)] = other.tokens
        _must_say(rig, expected, f"a grammar, {variant}")


def _goldens(subject: Subject, rule: Callable[..., Tensor] | None) -> list[Golden]:
    lengths = (5, subject.block_size + 1)
    if rule is None:
        return [clear("llama", length, _COUNT, seed=1) for length in lengths]
    return [clear("llama", length, _COUNT, rule) for length in lengths]


def _until(tokens: tuple[int, ...], ends: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens up to and with the first that is one of `ends`, where these may come from the sixth on."""
    last = next((index for index, token in enumerate(tokens) if index >= 5 and token in ends), len(tokens))
    return tokens[: last + 1]


def _must_say(rig: Rig, expected: dict[str, tuple[int, ...]], what: str) -> None:
    """Runs what was started and compares the tokens of each request."""
    news = rig.finish()
    for request_id, tokens in expected.items():
        got = tokens_of(news[request_id])
        if got != tokens:
            raise Mismatch(f"{what}: request {request_id} gave {list(got)}, expected {list(tokens)}")
