"""Encoding that leaves the interpreter to other threads while a long text is cut into tokens."""

from __future__ import annotations

import tokenizers

__all__ = ["encode_unlocked"]

LONG_CHARS = 4096
"""Shorter texts take less time than handing over the interpreter's lock is worth."""


def encode_unlocked(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Ids of `text`, as `backend.encode(text)` gives them.

    `encode` keeps the interpreter's lock to its end, so that a thread that encodes megabytes stops every other thread
    for seconds; only the batch calls give the lock up.
    """
    if len(text) < LONG_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
