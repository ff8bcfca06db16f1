"""From request fields to SamplingParams."""

from __future__ import annotations

from typing import Any

from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from core.serve.protocol import ChatRequest, CompletionRequest, SamplingFields

__all__ = ["chat_params", "completion_params"]

_OPTIONAL = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
)
_PLAIN = (
    "n",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def completion_params(body: CompletionRequest) -> SamplingParams:
    """What POST /v1/completions asks of sampling.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return _build(body, max_tokens=body.max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs)


def chat_params(body: ChatRequest) -> SamplingParams:
    """What POST /v1/chat/completions asks of sampling; `max_completion_tokens` wins over `max_tokens`.

    Raises:
        InvalidRequestError: naming the field that is out of range.
    """
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        return _build(body, max_tokens=limit, logprobs=logprobs, prompt_logprobs=body.prompt_logprobs)
    except InvalidRequestError as error:
        if error.param == "logprobs":
            error.param = "top_logprobs"
        raise


def _build(body: SamplingFields, **limits: Any) -> SamplingParams:
    given = {name: value for name in _OPTIONAL if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **given,
        **{name: getattr(body, name) for name in _PLAIN},
        **limits,
        logit_bias=_logit_bias(body.logit_bias),
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        bad_words=tuple(body.bad_words),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
    )


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token_id): value for token_id, value in given.items()}
    except ValueError:
        message = 'logit_bias keys must be token ids, as {"42": 5.0}; send integers as keys'
        raise InvalidRequestError(message, param="logit_bias") from None
