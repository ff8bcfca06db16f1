"""The OpenAI wire format as models that take nothing else: every field with its type, none unknown, none missing.

Fields that OpenAI's API always sends are required. Those that only this server adds (docs/serving.md) are optional and
typed; a field that is in neither list fails.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from core_conformance.subject import Mismatch

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatCompletion",
    "Completion",
    "CompletionChunk",
    "ErrorBody",
    "Model",
    "ModelList",
    "TextChoice",
    "Tokenized",
    "Usage",
    "parse",
]

Count = Annotated[StrictInt, Field(ge=0)]
Logprob = Annotated[float, Field(le=0.0)]
FinishReason = Literal["stop", "length", "abort"]
Shape = TypeVar("Shape", bound=BaseModel)


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class PromptTokensDetails(_Wire):
    """`usage.prompt_tokens_details`."""

    cached_tokens: Count


class Usage(_Wire):
    """`usage`."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails

    @model_validator(mode="after")
    def _adds_up(self) -> Usage:
        if self.total_tokens != self.prompt_tokens + self.completion_tokens:
            raise ValueError("total_tokens is not prompt_tokens + completion_tokens")
        if self.prompt_tokens_details.cached_tokens > self.prompt_tokens:
            raise ValueError("more prompt tokens are cached than there are")
        return self


class TextLogprobs(_Wire):
    """`logprobs` of a legacy completion: parallel lists, an entry a token."""

    tokens: list[StrictStr]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None
    text_offset: list[Count]

    @model_validator(mode="after")
    def _parallel(self) -> TextLogprobs:
        lengths = {len(self.tokens), len(self.token_logprobs), len(self.text_offset)}
        if len(lengths | ({len(self.top_logprobs)} if self.top_logprobs else set())) != 1:
            raise ValueError("the lists of logprobs differ in length")
        if self.text_offset != sorted(self.text_offset):
            raise ValueError("text_offset decreases")
        return self


class TopToken(_Wire):
    """A candidate of chat log-probabilities."""

    token: StrictStr
    logprob: Logprob
    bytes: list[Annotated[StrictInt, Field(ge=0, le=255)]] | None


class ChatToken(TopToken):
    """A token of chat log-probabilities with its candidates, best first."""

    top_logprobs: list[TopToken]

    @model_validator(mode="after")
    def _best_first(self) -> ChatToken:
        values = [top.logprob for top in self.top_logprobs]
        if values != sorted(values, reverse=True):
            raise ValueError("top_logprobs are not in order")
        return self


class ChatLogprobs(_Wire):
    """`logprobs` of a chat choice."""

    content: list[ChatToken] | None
    refusal: None = None


class _Extras(_Wire):
    """What `return_token_ids` and `prompt_logprobs` add to a choice."""

    stop_reason: StrictInt | StrictStr | None = None
    token_ids: list[Count] | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class TextChoice(_Extras):
    """A choice of a completion."""

    index: Count
    text: StrictStr
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class TextChunkChoice(TextChoice):
    """A choice of a chunk of a completion."""

    finish_reason: FinishReason | None  # type: ignore[assignment]


class Message(_Wire):
    """The assistant's message."""

    role: Literal["assistant"]
    content: StrictStr | None
    refusal: StrictStr | None


class ChatChoice(_Extras):
    """A choice of a chat completion."""

    index: Count
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class Delta(_Wire):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: StrictStr | None = None


class ChatChunkChoice(_Extras):
    """A choice of a chunk of a chat completion."""

    index: Count
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class _Answer(_Wire):
    id: Annotated[StrictStr, Field(min_length=6)]
    created: Annotated[StrictInt, Field(gt=1_700_000_000)]
    model: StrictStr
    system_fingerprint: StrictStr | None = None
    service_tier: StrictStr | None = None
    prompt_token_ids: list[Count] | None = None


class Completion(_Answer):
    """Answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Field(min_length=1)]
    usage: Usage


class CompletionChunk(_Answer):
    """An event of a streamed completion; `choices` is empty in the one that carries the usage."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: Usage | None = None


class ChatCompletion(_Answer):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ChatChunk(_Answer):
    """An event of a streamed chat completion; `choices` is empty in the one that carries the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(_Wire):
    """An entry of GET /v1/models."""

    id: StrictStr
    object: Literal["model"]
    created: Annotated[StrictInt, Field(gt=1_700_000_000)]
    owned_by: StrictStr
    root: StrictStr | None = None
    parent: StrictStr | None = None
    max_model_len: Annotated[StrictInt, Field(gt=0)] | None = None


class ModelList(_Wire):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: Annotated[list[Model], Field(min_length=1)]


class Tokenized(_Wire):
    """Answer of POST /tokenize."""

    count: Count
    max_model_len: Annotated[StrictInt, Field(gt=0)]
    tokens: list[Count]
    token_strs: list[StrictStr] | None = None


class _Error(_Wire):
    message: Annotated[StrictStr, Field(min_length=5, max_length=3000)]
    type: Annotated[StrictStr, Field(min_length=3)]
    param: StrictStr | None
    code: StrictStr | None


class ErrorBody(_Wire):
    """Every answer that is not 200."""

    error: _Error


def parse(shape: type[Shape], raw: bytes | str, what: str) -> Shape:
    """The answer as `shape`.

    Raises:
        Mismatch: naming the first field that is wrong, missing or unknown, and how many more there are.
    """
    try:
        return shape.model_validate_json(raw, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the body"
        value = str(first.get("input"))[:120]
        raise Mismatch(
            f"{what}: {place} of {shape.__name__}: {first['msg']} (is {value}); {error.error_count()} wrong in all"
        ) from None
