"""Encodes text of several owners: only the template's characters may spell a protected token.

The whole text goes through the tokenizer once, so merges, normalization and space prefixes at the borders are those
of the plain text. Protected tokens are known to this encoder under private names only; occurrences whose characters
all have the right owner are renamed to these before encoding, and nothing else can spell them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping

import tokenizers

from core.text.unlocked_encoding import encode_unlocked

__all__ = ["MarkedEncoder"]

_OWNED_RUN = re.compile(rb"[\x01\x02]+")


class MarkedEncoder:
    """Encoder for one set of protected ids over a tokenizer that it shares and does not change.

    Args:
        backend: Its model, normalizer and pre-tokenizer are shared.
        added: Added tokens by id.
        control: Ids that the template's text alone may spell.
        markup: Ids that the template's and the assistant's text may spell.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        added: Mapping[int, tokenizers.AddedToken],
        control: frozenset[int],
        markup: frozenset[int] = frozenset(),
    ) -> None:
        protected = control | markup
        # Private-use letters around an unguessable number: no user can type a name of this process.
        nonce = secrets.token_hex(16)
        self._model = backend.model
        self._protected = protected
        self._name_of: dict[str, str] = {}
        self._owners_of: dict[str, bytes] = {}
        self._encoder = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._encoder.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._encoder.pre_tokenizer = backend.pre_tokenizer
        names = []
        for token_id, token in sorted(added.items()):
            name = f"\ue8d1{nonce}-{token_id}\ue8d2" if token_id in protected else token.content
            if token_id in protected:
                self._name_of[token.content] = name
                self._owners_of[token.content] = b"\1" if token_id in control else b"\1\2"
            names.append((token_id, _renamed(token, name, token_id in protected)))
        self._encoder.add_tokens([token for _, token in names])
        self._restored = {self._own_id(token.content): token_id for token_id, token in names}
        self._renamed_ids = {self._own_id(name) for name in self._name_of.values()}
        self._lengths: dict[str, list[int]] = {}
        for content in self._name_of:
            self._lengths.setdefault(content[:1], []).append(len(content))
        self._lengths = {first: sorted(set(lengths), reverse=True) for first, lengths in self._lengths.items()}

    def encode(self, text: str, mask: bytes) -> list[int]:
        """Ids of `text`; `mask` has one byte for each character, its owner as in `core.text.owned_text`."""
        ids: list[int] = []
        for token_id in encode_unlocked(self._encoder, self._rename_owned(text, mask), add_special_tokens=False):
            restored = self._restored.get(token_id, token_id)
            if restored in self._protected and token_id not in self._renamed_ids:
                ids += self._spell(restored)
            else:
                ids.append(restored)
        return ids

    def _own_id(self, content: str) -> int:
        token_id = self._encoder.token_to_id(content)
        assert token_id is not None, "a token that was just added has an id"
        return token_id

    def _rename_owned(self, text: str, mask: bytes) -> str:
        pieces, end = [], 0
        for start, length in self._owned_occurrences(text, mask):
            pieces += [text[end:start], self._name_of[text[start : start + length]]]
            end = start + length
        return "".join([*pieces, text[end:]])

    def _owned_occurrences(self, text: str, mask: bytes) -> Iterator[tuple[int, int]]:
        """(start, length) of protected tokens inside owned runs: leftmost first, longest at each place."""
        if not self._lengths:
            return
        first = re.compile("|".join(map(re.escape, self._lengths)))
        for run in _OWNED_RUN.finditer(mask):
            position = run.start()
            while (found := first.search(text, position, run.end())) is not None:
                position = found.start()
                length = self._length_at(text, mask, position, run.end())
                if length:
                    yield position, length
                position += length or 1

    def _length_at(self, text: str, mask: bytes, start: int, end: int) -> int:
        for length in self._lengths[text[start]]:
            owners = self._owners_of.get(text[start : start + length]) if start + length <= end else None
            if owners is not None and not mask[start : start + length].strip(owners):
                return length
        return 0

    def _spell(self, token_id: int) -> list[int]:
        """Ids for the characters of a protected token that the model itself put together from unowned text."""
        piece = self._model.id_to_token(token_id)
        if piece is None or len(piece) < 2:
            return [token_id]
        ids: list[int] = []
        for part in (piece[:1], piece[1:]):
            for token in self._model.tokenize(part):
                ids += self._spell(token.id) if token.id in self._protected else [token.id]
        return ids


def _renamed(token: tokenizers.AddedToken, name: str, private: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not private,
        special=False,
    )
