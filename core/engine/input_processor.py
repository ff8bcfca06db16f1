"""From what a caller sends to what the engine takes. Whatever is wrong with a request is found here, before it is
scheduled: on a device an id out of range takes every running request down."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

import msgspec

from core.errors import ContextLengthError, InvalidRequestError
from core.request import EngineRequest
from core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from core.text.tokenizer import Tokenizer

__all__ = ["MAX_REQUEST_ID_LEN", "InputProcessor", "ProcessedRequest", "Prompt", "TokensPrompt"]

MAX_REQUEST_ID_LEN = 256
"""Characters of an id that a caller may choose; it is echoed in every chunk."""


class TokensPrompt(TypedDict):
    """A prompt that is already tokenized."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A prompt that is text."""

    prompt: str


Prompt = str | Sequence[int] | TokensPrompt | TextPrompt
"""What a caller may give as one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """A request that passed every check.

    Args:
        request_id: The caller's label, or one made up where the caller gave none. Not unique.
        key: Unique among all requests of this process and of any other.
        prompt: The text where the caller gave text.
        choices: One request for each of `n` choices, in the order of their index.
    """

    request_id: str
    key: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    choices: tuple[EngineRequest, ...]


class InputProcessor:
    """Checks requests and turns them into EngineRequests.

    Args:
        tokenizer: None where every prompt comes as ids and no `bad_words` are used.
        vocab_size: Ids that the model can take are in [0, vocab_size).
        max_model_len: Longest sequence, prompt and output.
        max_logprobs: Bound of `logprobs` and `prompt_logprobs`.
        eos_token_ids: Every id that ends a sequence of this model.
        seed: Makes the seeds of requests without one reproducible, in the order of arrival; None draws them from
            the system, so that two processes never answer alike.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        eos_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        external_id: str | None = None,
    ) -> ProcessedRequest:
        """Everything that the engine needs to run `prompt`, one EngineRequest a choice.

        Choice i of a request with `seed` s draws with seed s + i (modulo 2**64), so that each of its choices can be
        had again alone. `max_tokens` None becomes the room that the prompt leaves in the context window.

        Args:
            prompt: Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`. A rendered chat comes as ids.
            params: As the caller gave them; not changed.
            request_id: A label of the caller's; two requests in flight may share it.
            priority: Lower runs first.
            cache_salt: Requests share cached prefixes only where their salts are equal.
            adapter: Name of a LoRA adapter.
            external_id: Another label, for traces.

        Raises:
            InvalidRequestError: naming the field, the value and what to do.
        """
        arrival_time = time.time()
        for name, label in (("request_id", request_id), ("external_id", external_id)):
            _check_label(name, label)
        given = _unwrapped(prompt)
        token_ids = self._token_ids(given)
        params = self._resolve(params, len(token_ids))
        key = uuid.uuid4().hex
        choices = tuple(
            EngineRequest(
                request_id=f"{key}-{index}",
                prompt_token_ids=token_ids,
                sampling_params=_choice_params(params, index),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                adapter=adapter,
                external_id=external_id or request_id,
            )
            for index in range(params.n)
        )
        return ProcessedRequest(
            request_id=request_id or key,
            key=key,
            prompt=given if isinstance(given, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time=arrival_time,
            choices=choices,
        )

    def _token_ids(self, prompt: str | Sequence[int]) -> list[int]:
        token_ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidRequestError(
                "the prompt has no tokens; send at least one", param="prompt", code="empty_prompt"
            )
        for position, token_id in enumerate(token_ids):
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"the prompt holds token id {token_id!r} at position {position}; "
                    f"ids must be integers in [0, {self._vocab_size})",
                    param="prompt",
                )
        return token_ids

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("the prompt is text and the engine has no tokenizer; send ids", param="prompt")
        return list(self._tokenizer.encode(text))

    def _resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """The parameters with every default filled in that depends on model, prompt or chance."""
        max_tokens = self._max_tokens(params, num_prompt_tokens)
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed % 2**64
        params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            seed=seed,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=params.bad_words_token_ids + self._bad_words_token_ids(params.bad_words),
        )
        params.check_vocabulary(self._vocab_size, self._max_logprobs)
        _check_allowed(params)
        return params

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Output tokens that the request may have; both lengths are in the message where they do not fit."""
        room = self._max_model_len - num_prompt_tokens
        wanted = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        if wanted > room:
            name = "max_tokens" if params.max_tokens is not None else "min_tokens" if params.min_tokens else "output"
            advice = f"or ask for at most {room} output tokens" if room > 0 else "to leave room for output"
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens and {name} needs {wanted}, {num_prompt_tokens + wanted} "
                f"together, but the context window holds {self._max_model_len}; shorten the prompt {advice}",
                param="prompt" if room < 1 or params.max_tokens is None else "max_tokens",
            )
        return room if params.max_tokens is None else params.max_tokens

    def _bad_words_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as a model may spell it: at the start of a line, and after a space."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            for spelling in (bare, " " + bare):
                sequences[self._word_token_ids(word, spelling)] = None
        return tuple(sequences)

    def _word_token_ids(self, word: str, spelling: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise InvalidRequestError("bad_words needs a tokenizer and the engine has none", param="bad_words")
        token_ids = tuple(self._tokenizer.encode(spelling, add_special_tokens=False))
        if not token_ids:
            raise InvalidRequestError(f"bad_words holds {word!r}, which has no tokens; leave it out", param="bad_words")
        return token_ids


def _unwrapped(prompt: object) -> str | Sequence[int]:
    """The text or the ids of a prompt, out of the object that holds them where there is one."""
    given = prompt
    if isinstance(given, Mapping):
        given = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(given, (bytes, bytearray)) or not isinstance(given, Sequence):
        raise InvalidRequestError(
            "a prompt must be text, a list of token ids, or {'prompt': text} or {'prompt_token_ids': ids}, "
            f"got {type(prompt).__name__}",
            param="prompt",
        )
    return given


def _check_label(name: str, label: str | None) -> None:
    if label is not None and len(label) > MAX_REQUEST_ID_LEN:
        raise InvalidRequestError(
            f"{name} has {len(label)} characters; at most {MAX_REQUEST_ID_LEN} are taken", param=name
        )


def _check_allowed(params: SamplingParams) -> None:
    """Refuses an allowlist that `bad_words` leaves nothing of; the sampler would have no candidate at all."""
    if params.allowed_token_ids is None:
        return
    banned = {sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1}
    if banned.issuperset(params.allowed_token_ids):
        raise InvalidRequestError(
            f"bad_words bans every one of allowed_token_ids {sorted(set(params.allowed_token_ids))}; "
            "allow another id or drop the word",
            param="bad_words",
        )


def _choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of choice `index`: its own seed; the prompt's logprobs are computed once, with choice 0."""
    if params.n == 1:
        return params
    assert params.seed is not None
    return msgspec.structs.replace(
        params,
        n=1,
        seed=(params.seed + index) % 2**64,
        prompt_logprobs=params.prompt_logprobs if index == 0 else None,
    )
