"""Reads a SentencePiece `tokenizer.model` (a protocol buffer) into the form of GGUF metadata.

Fields, from sentencepiece_model.proto: ModelProto pieces = 1 (piece = 1, score = 2, type = 3), trainer_spec = 2
(model_type = 3, byte_fallback = 35, unk_id .. eos_id = 40 .. 42), normalizer_spec = 3 (precompiled_charsmap = 2,
add_dummy_prefix = 3, remove_extra_whitespaces = 4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["read_sentencepiece_model"]

_NORMAL, _BPE = 1, 2


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field: int for varints, float for 32 bits, bytes otherwise."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, offset = _varint(data, offset)
            yield number, value
        elif kind == 5:
            yield number, struct.unpack_from("<f", data, offset)[0]
            offset += 4
        elif kind == 1:
            yield number, data[offset : offset + 8]
            offset += 8
        elif kind == 2:
            length, offset = _varint(data, offset)
            if offset + length > len(data):
                raise ValueError("a field runs past the end")
            yield number, data[offset : offset + length]
            offset += length
        else:
            raise ValueError(f"wire type {kind} is not known")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def read_sentencepiece_model(data: bytes) -> dict[str, Any] | None:
    """`tokenizer.ggml.*` entries of the model; None where its kind needs the full converter.

    That is so for unigram models, and for those that rewrite characters or drop spaces before they encode.

    Raises:
        ValueError, IndexError, struct.error: the data is no such model.
    """
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece.get(1, b"").decode("utf-8"))
            scores.append(piece.get(2, 0.0))
            types.append(piece.get(3, _NORMAL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if trainer.get(3, 1) != _BPE or normalizer.get(2) or normalizer.get(4, 1):
        return None
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": _signed(trainer.get(40, 0)),
        "tokenizer.ggml.bos_token_id": _signed(trainer.get(41, 1)),
        "tokenizer.ggml.eos_token_id": _signed(trainer.get(42, 2)),
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }
