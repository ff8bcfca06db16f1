"""Prompts for the copy model and the answers that its definition gives, as token ids and as text.

A prompt is longer than COPY_DISTANCE. Its letters are those whose copies, and the copies of those, are printable ASCII
again, so that an answer of up to `DEPTH * (COPY_DISTANCE + 1)` tokens is plain text, one letter a token.
"""

from __future__ import annotations

import functools
import random

from tokenizers import pre_tokenizers

from core_conformance.engines.goldens import copies
from core_conformance.engines.models import COPY_DISTANCE, copy_next

__all__ = ["DEPTH", "STOP", "STOP_CAUSE", "copy_answer", "copy_prompt", "ids_of", "letters", "text_of"]

DEPTH = 2
"""How often a letter of a prompt can be copied and stay printable."""
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The tokenizer's byte tokens by id; printable ASCII but the space stands for itself and comes first."""
_PRINTABLE = 94
STOP_CAUSE = "c"
"""A letter whose copy is STOP; no other letter of `letters` leads there."""


def ids_of(text: str) -> tuple[int, ...]:
    """Token ids of printable ASCII text without spaces."""
    return tuple(_BYTES.index(char) for char in text)


def text_of(ids: tuple[int, ...]) -> str:
    """Text of ids that are printable ASCII."""
    assert all(token < _PRINTABLE for token in ids), "not all of these ids are printable ASCII"
    return "".join(_BYTES[token] for token in ids)


STOP = text_of((copy_next(ids_of(STOP_CAUSE)[0]),))
"""What the copy model says for STOP_CAUSE."""


@functools.cache
def letters() -> str:
    """Letters that prompts are made of."""
    found = [token for token in range(_PRINTABLE) if all(part < _PRINTABLE for part in _orbit(token))]
    stop = set(ids_of(STOP))
    return text_of(tuple(token for token in found if not stop & {token, *_orbit(token)}))


def _orbit(token: int) -> list[int]:
    orbit = [token]
    for _ in range(DEPTH):
        orbit.append(copy_next(orbit[-1]))
    return orbit[1:]


@functools.cache
def copy_prompt(length: int, seed: int = 0) -> str:
    """Random letters; two seeds share no block of a prefix cache."""
    assert length > COPY_DISTANCE, f"the copy model needs a prompt of more than {COPY_DISTANCE} tokens"
    dice = random.Random(7919 * seed + length)
    return "".join(dice.choice(letters()) for _ in range(length))


def copy_answer(prompt: str, count: int) -> str:
    """The `count` tokens that must follow, as text."""
    return text_of(copies(ids_of(prompt), count))
