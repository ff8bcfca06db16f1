"""What a caller may ask of sampling: `SamplingParams`, validated without a model and against one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from core.errors import InvalidRequestError

__all__ = ["MAX_LOGPROBS", "SamplingParams"]

MAX_LOGPROBS = 20
"""Default bound of `logprobs` and `prompt_logprobs` (flag `--max-logprobs`)."""


_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_STRINGS = ("stop", "bad_words")
_IDS = ("stop_token_ids", "allowed_token_ids")
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to sample one request. Field names and defaults are those that users of vLLM know.

    Lists are taken where tuples are kept, and a lone string for `stop` and `bad_words`.

    Raises:
        InvalidRequestError: on construction, naming the field, where a value is out of range or of a wrong type.
    """

    n: int = 1
    """Choices a prompt."""
    temperature: float = 1.0
    """0 is greedy; values below 1e-2 are computed in fp32 without overflow and act like greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`bad_words` as token sequences (bare and with a leading space); filled by the input processor."""
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    """None draws a fresh seed for each request."""
    max_tokens: int | None = 16
    """None means up to the context window. 0 generates nothing (scoring requests)."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Covers every EOS id of the model's configuration; `stop_token_ids` of the caller still stop."""
    eos_token_ids: tuple[int, ...] = ()
    """EOS ids of the model; filled by the input processor, never by a caller."""
    logprobs: int | None = None
    """Number of top candidates to report for each output token (the sampled one is always reported)."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_types()

        def check(ok: bool, field: str, rule: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{field} must be {rule}, got {getattr(self, field)!r}", param=field)

        check(self.n >= 1, "n", "at least 1")
        check(0.0 <= self.temperature < float("inf"), "temperature", "finite and at least 0")
        check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]")
        check(-1 <= self.top_k < 2**63, "top_k", "-1 or 0 (keep all) or at least 1, and a 64-bit integer")
        check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]")
        check(0.0 < self.repetition_penalty < float("inf"), "repetition_penalty", "finite and above 0")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]")
        check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0, or null for no limit")
        check(self.min_tokens >= 0, "min_tokens", "at least 0")
        if self.max_tokens is not None:
            check(self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens ({self.max_tokens})")
        check(self.logprobs is None or self.logprobs >= 0, "logprobs", "at least 0")
        check(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "at least 0")
        check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        check(all(self.stop), "stop", "non-empty strings")
        check(all(self.bad_words), "bad_words", "non-empty strings")
        check(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "non-empty")
        if self.logit_bias is not None:
            check(
                all(-100.0 <= v <= 100.0 for v in self.logit_bias.values()), "logit_bias", "in [-100, 100] for each id"
            )

    def _check_types(self) -> None:
        """Makes tuples of lists. A value of a wrong type would fail in a step, together with everyone else's in it."""

        def wrong(field: str, wanted: str) -> InvalidRequestError:
            return InvalidRequestError(f"{field} must be {wanted}, got {getattr(self, field)!r}", param=field)

        for field in _INTEGERS:
            value = getattr(self, field)
            if type(value) is not int and not (value is None and field in _OPTIONAL):
                raise wrong(field, "an integer")
        for field in _NUMBERS:
            if type(getattr(self, field)) not in (float, int):
                raise wrong(field, "a number")
        for field, kind, wanted in (*((f, str, "strings") for f in _STRINGS), *((f, int, "token ids") for f in _IDS)):
            value = getattr(self, field)
            if value is None and field == "allowed_token_ids":
                continue
            values = (value,) if isinstance(value, str) else value
            if not isinstance(values, (tuple, list)) or not all(type(item) is kind for item in values):
                raise wrong(field, f"a list of {wanted}")
            if values is not value or isinstance(value, list):
                msgspec.structs.force_setattr(self, field, tuple(values))
        self._check_bias(wrong)

    def _check_bias(self, wrong: Callable[[str, str], InvalidRequestError]) -> None:
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, dict)
            and all(type(token_id) is int for token_id in bias)
            and all(type(value) in (float, int) for value in bias.values())
        ):
            raise wrong("logit_bias", "an object from token id to number")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raises InvalidRequestError, naming the field, where an id is not in [0, vocab_size) or a count is too large.

        Done before scheduling: on an accelerator an out-of-range gather takes every running request down.
        """

        def check(ids: Sequence[int], field: str) -> None:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{field} holds token id {token_id}; ids must be in [0, {vocab_size})", param=field
                    )

        check(tuple(self.logit_bias or ()), "logit_bias")
        check(self.stop_token_ids, "stop_token_ids")
        check(self.allowed_token_ids or (), "allowed_token_ids")
        for sequence in self.bad_words_token_ids:
            check(sequence, "bad_words")
        limit = min(max_logprobs, vocab_size)
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None and value > limit:
                raise InvalidRequestError(f"{field} must be at most {limit}, got {value}", param=field)
