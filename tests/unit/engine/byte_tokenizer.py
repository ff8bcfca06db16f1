"""A byte-level Tokenizer of 1000 ids whose pieces a test chooses."""

from __future__ import annotations

from collections.abc import Mapping

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from core.text.tokenizer import Tokenizer, TokenizerInfo

VOCAB_SIZE = 1000
FIRST_BYTE = 700
"""Byte b has the id FIRST_BYTE + b where the test gave it none of its own."""


def byte_tokenizer(pieces: Mapping[int, bytes] | None = None, *, eos: tuple[int, ...] = ()) -> Tokenizer:
    """Ids of `pieces` stand for those bytes, ids from FIRST_BYTE for single bytes, all others i for "<i>"."""
    letters = _letters()
    by_id = {token_id: "".join(letters[byte] for byte in data) for token_id, data in (pieces or {}).items()}
    taken = set(by_id.values())
    for byte, letter in enumerate(letters):
        if letter not in taken:
            by_id.setdefault(FIRST_BYTE + byte, letter)
    for token_id in range(VOCAB_SIZE):
        by_id.setdefault(token_id, f"<{token_id}>")
    backend = tokenizers.Tokenizer(models.BPE({piece: token_id for token_id, piece in by_id.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, TokenizerInfo(eos_token_ids=eos, source="test"))


def _letters() -> list[str]:
    """The letter of each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
