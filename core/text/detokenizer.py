"""Streaming text: token ids in, whole characters out."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from core.errors import InvalidRequestError
from core.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "logprob_keys", "logprob_text"]

_LONGEST_TAIL = 3
"""Bytes of an unfinished UTF-8 character, at most."""


class IncrementalDetokenizer:
    """Turns output ids into text as they come. All deltas and `finish()` joined are the text of the output.

    An unfinished character is held back until it is whole or the stream ends; bytes that can never become one show
    as U+FFFD. Works on bytes: no token is decoded twice, and no sequence of ids can make it raise.

    Args:
        tokenizer: Shared, not changed.
        prompt_token_ids: Only an unfinished last character of the prompt matters: the output may complete it. Any
            prompt makes the output a continuation, whose first space is kept.
        skip_special_tokens: Leave control tokens out of the text.
        spaces_between_special_tokens: Accepted for compatibility: tokens are joined byte by byte, so that no spaces
            are put between added tokens either way.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._prompt_tail = self._unfinished_tail(prompt_token_ids)
        self._drop_space = not prompt_token_ids and tokenizer.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became whole with these ids, possibly ""."""
        return "".join([self._decoder.decode(self._bytes_of(token_id)) for token_id in token_ids])

    def finish(self) -> str:
        """What is left at the end of the stream: U+FFFD for a character that was never completed, or ""."""
        return self._decoder.decode(b"", final=True)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        data = _bytes_or_nothing(self._tokenizer, token_id)
        if not data:
            return b""
        if self._drop_space:
            self._drop_space = False
            if token_id not in self._tokenizer.added_tokens and data.startswith(b" "):
                data = data[1:]
        if self._prompt_tail:
            # Only a continuation byte completes the prompt's character; otherwise that is the prompt's affair.
            data, self._prompt_tail = (self._prompt_tail + data if 0x80 <= data[0] < 0xC0 else data), b""
        return data

    def _unfinished_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        data = b""
        for token_id in reversed(prompt_token_ids):
            if token_id in self._skipped:
                break
            data = _bytes_or_nothing(self._tokenizer, token_id) + data
            if len(data) > _LONGEST_TAIL:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data[-_LONGEST_TAIL:])
        return decoder.getstate()[0]


def _bytes_or_nothing(tokenizer: Tokenizer, token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except InvalidRequestError:
        # A model may sample an id that its vocabulary leaves empty; there is no text to show for it.
        return b""


def logprob_text(tokenizer: Tokenizer, token_id: int) -> str:
    r"""Text of one candidate token; bytes that are no whole characters show as "bytes:\xf0\x9f", each its own.

    Raises:
        InvalidRequestError: there is no such id.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def logprob_keys(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Texts of candidate tokens, made distinct: one that came before gets its id behind it.

    Raises:
        InvalidRequestError: an id is not in the vocabulary.
    """
    keys: list[str] = []
    for token_id in token_ids:
        text = logprob_text(tokenizer, token_id)
        keys.append(f"{text}<token_id:{token_id}>" if text in keys else text)
    return keys
