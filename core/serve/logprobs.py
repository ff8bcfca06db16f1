"""Log-probabilities in the shapes of the API: chat, legacy completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from core.outputs import PositionLogprobs
from core.serve.interface import ServedTokenizer

__all__ = ["CompletionLogprobs", "TokenTexts", "chat_logprobs", "prompt_logprobs_json"]

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""


class TokenTexts:
    """How single tokens are shown. Bytes that are no complete text are shown as `bytes:\\xf0\\x9f`, so that
    different fragments stay different.

    Args:
        tokenizer: Where the bytes come from; results are kept.
        as_ids: Show `token_id:N` instead (`return_tokens_as_token_ids`).
    """

    def __init__(self, tokenizer: ServedTokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def raw(self, token_id: int) -> bytes:
        """The token's bytes."""
        return self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """The token as shown to a caller."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.raw(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def chat_logprobs(entries: Sequence[PositionLogprobs], texts: TokenTexts, top: int) -> dict[str, Any]:
    """`choice.logprobs` of chat completions: each token with its `top` best candidates in order of rank."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token_id), "logprob": _finite(logprob), "bytes": list(texts.raw(token_id))}

    content = []
    for entry in entries:
        item = shown(entry.token_ids[0], entry.logprobs[0])
        candidates = zip(entry.token_ids[1 : top + 1], entry.logprobs[1 : top + 1], strict=True)
        item["top_logprobs"] = [shown(token_id, logprob) for token_id, logprob in candidates]
        content.append(item)
    return {"content": content, "refusal": None}


def prompt_logprobs_json(entries: Sequence[PositionLogprobs | None], texts: TokenTexts) -> list[Any]:
    """vLLM's `prompt_logprobs`: null for the first token, then `{id: {logprob, rank, decoded_token}}`."""
    return [None if entry is None else _by_id(entry, texts) for entry in entries]


def _by_id(entry: PositionLogprobs, texts: TokenTexts) -> dict[str, Any]:
    shown = {}
    pairs = list(zip(entry.token_ids, entry.logprobs, strict=True))
    for rank, (token_id, logprob) in enumerate(pairs[1:], start=1):
        shown[str(token_id)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}
    token_id, logprob = pairs[0]
    actual = {"logprob": _finite(logprob), "rank": entry.actual_rank, "decoded_token": texts.text(token_id)}
    return {str(token_id): actual, **{k: v for k, v in shown.items() if k != str(token_id)}}


class CompletionLogprobs:
    """`choice.logprobs` of legacy completions, built token by token: four parallel lists.

    Offsets count characters of the choice's text; they start at 0 and never decrease.
    """

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top_logprobs: list[dict[str, float] | None] = []
        self._text_offset: list[int] = []

    def add(self, token_id: int, entry: PositionLogprobs | None, *, hidden: bool = False) -> None:
        """Takes one token; `entry` is None where nothing precedes it. A hidden token takes no characters."""
        self._tokens.append(self._texts.text(token_id))
        self._text_offset.append(self._offset)
        self._token_logprobs.append(None if entry is None else _finite(entry.logprobs[0]))
        self._top_logprobs.append(None if entry is None else self._candidates(entry))
        if not hidden:
            self._offset += len(self._decoder.decode(self._texts.raw(token_id)))

    def jump(self, offset: int) -> None:
        """The next token begins at `offset`, the length of the text so far."""
        self._offset = offset
        self._text_offset = [min(known, offset) for known in self._text_offset]
        self._decoder.reset()

    def _candidates(self, entry: PositionLogprobs) -> dict[str, float]:
        best: dict[str, float] = {}
        pairs = list(zip(entry.token_ids, entry.logprobs, strict=True))
        seen: set[int] = set()
        for token_id, logprob in [*pairs[1 : self._top + 1], pairs[0]]:
            if token_id in seen:
                continue
            seen.add(token_id)
            text = self._texts.text(token_id)
            best[text if text not in best else f"token_id:{token_id}"] = _finite(logprob)
        return best

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        taken = {
            "tokens": self._tokens,
            "token_logprobs": self._token_logprobs,
            "top_logprobs": self._top_logprobs if self._top else None,
            "text_offset": self._text_offset,
        }
        self._clear()
        return taken
