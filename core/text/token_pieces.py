"""What single tokens are in bytes: byte-level alphabets, byte fallback and the SentencePiece space mark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

__all__ = ["marks_spaces", "piece_decoder", "strips_leading_space"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder as plain values, one for each step."""
    if tokenizer.decoder is None:
        return []
    state = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state.get("type") == "Sequence" else [state]
    return steps


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in piece)
    except KeyError:
        return piece.encode("utf-8")


def _sentence_piece(piece: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    if match is not None:
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode("utf-8")


def _word_piece(prefix: str) -> Callable[[str], bytes]:
    def decode(piece: str) -> bytes:
        return (piece[len(prefix) :] if piece.startswith(prefix) else " " + piece).encode("utf-8")

    return decode


def _suffixed(suffix: str) -> Callable[[str], bytes]:
    return lambda piece: piece.replace(suffix, " ").encode("utf-8")


def piece_decoder(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """A function from a vocabulary piece (not an added token) to the bytes that it stands for in running text."""
    for step in _decoder_steps(tokenizer):
        kind = step.get("type")
        if kind == "ByteLevel":
            return _byte_level
        if kind == "WordPiece":
            return _word_piece(step.get("prefix", "##"))
        if kind == "BPEDecoder":
            return _suffixed(step.get("suffix", "</w>"))
        if kind in ("ByteFallback", "Metaspace", "Replace"):
            return _sentence_piece
    return lambda piece: piece.encode("utf-8")


def marks_spaces(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether decoding turns "▁" into a space, in added tokens too."""
    return any(
        step.get("type") == "Metaspace"
        or (step.get("type") == "Replace" and step.get("pattern") == {"String": "▁"} and step.get("content") == " ")
        for step in _decoder_steps(tokenizer)
    )


def strips_leading_space(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether decoding a whole text drops the space that encoding put in front of it."""
    for step in _decoder_steps(tokenizer):
        kind = step.get("type")
        if kind == "Strip" and step.get("content") == " " and step.get("start", 0) > 0:
            return True
        if kind == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
        if kind == "WordPiece":
            return True
    return False
