"""Request bodies of the API. Answers are written as bytes by `completions` and `chat`, without models in between."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from core.serve.errors import ApiError, first_problem

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "Prompt",
    "SamplingFields",
    "StreamOptions",
    "TokenizeRequest",
    "read_body",
]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
"""Characters of a stop string: every choice of a request looks for each of them."""
MAX_CHOICES = 128
MAX_PROMPTS = 1024

Prompt = str | list[int]
"""One prompt as the engine takes it: text or token ids."""
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Body = TypeVar("Body", bound=BaseModel)

_UNAVAILABLE: dict[str, str] = {
    "structured_outputs": "structured output is not available yet",
    "guided_json": "structured output is not available yet",
    "guided_regex": "structured output is not available yet",
    "guided_choice": "structured output is not available yet",
    "guided_grammar": "structured output is not available yet",
    "use_beam_search": "beam search is not available; use n and temperature",
    "suffix": "insertion is not available; put the suffix in the prompt",
    "truncate_prompt_tokens": "truncation is not available; shorten the prompt",
    "logprob_token_ids": "logprobs of chosen ids are not available; use logprobs",
    "kv_transfer_params": "KV transfer is not available",
    "thinking_token_budget": "a thinking budget is not available; use max_tokens",
    "chat_template": "a template in a request is not accepted; start the server with --chat-template",
    "functions": "functions are deprecated; use tools",
    "function_call": "function_call is deprecated; use tool_choice",
    "audio": "audio output is not available; leave it out",
}
"""Fields that would change the result and cannot be honoured: refused. Other unknown fields are ignored."""


def _one_prompt(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(type(x) is int for x in value))


def _prompts(value: Any) -> list[Prompt]:
    """A str, a list of ids, or a list of these, as a list. By hand: a union of lists would be slow and wordy."""
    prompts = [value] if _one_prompt(value) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("prompt must be a non-empty string, list of token ids, or list of these")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"prompt holds {len(prompts)} prompts; send at most {MAX_PROMPTS} in one request")
    for index, prompt in enumerate(prompts):
        if not _one_prompt(prompt):
            raise ValueError(f"prompt[{index}] must be a string or a non-empty list of token ids")
    return prompts


def _strings(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


class _Body(BaseModel):
    """JSON types are kept apart: a number in a string, or true for 1, is a mistake of the client and is said."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), strict=True)


class StreamOptions(_Body):
    """`stream_options` of a streamed request."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(_Body):
    """`response_format`; only "text" is served yet."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]


class SamplingFields(_Body):
    """Fields that completions and chat completions share: OpenAI's, then vLLM's extras."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: Annotated[list[StopString], BeforeValidator(_strings), Field(max_length=MAX_STOP_STRINGS)] = Field(
        default_factory=list
    )
    response_format: ResponseFormat | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[str], BeforeValidator(_strings)] = Field(default_factory=list)
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    priority: int = Field(0, ge=-(2**63), lt=2**63)
    request_id: str | None = None
    cache_salt: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unavailable(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("the request body must be a JSON object")
        for field, reason in _UNAVAILABLE.items():
            if field in data and data[field] not in (None, False, "", [], {}, "none"):
                raise ApiError(400, f"{field}: {reason}", param=field, code="unsupported_field")
        return data

    @model_validator(mode="after")
    def _check(self) -> SamplingFields:
        if self.response_format is not None and self.response_format.type != "text":
            message = f"response_format {self.response_format.type!r} is not available yet; use 'text' or leave it out"
            raise ApiError(400, message, param="response_format", code="unsupported_field")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true; set it or leave them out", param="stream_options")
        if self.cache_salt == "":
            raise ApiError(400, "cache_salt must not be empty; leave it out for a shared cache", param="cache_salt")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries usage."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(SamplingFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            message = f"best_of {self.best_of} differs from n {self.n}; ranking is not available, leave best_of out"
            raise ApiError(400, message, param="best_of", code="unsupported_field")
        return self


_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class ChatPromptFields(_Body):
    """Fields that decide how a conversation becomes a prompt; shared by chat completions and /tokenize."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _check_messages(self) -> ChatPromptFields:
        for index, message in enumerate(self.messages):
            _check_message(index, message)
        for index, tool in enumerate(self.tools or ()):
            _check_tool(index, tool)
        if self.add_generation_prompt and self.continue_final_message:
            text = "continue_final_message and add_generation_prompt exclude each other; set one of them to false"
            raise ApiError(400, text, param="continue_final_message")
        return self


def _check_message(index: int, message: dict[str, Any]) -> None:
    where = f"messages.{index}"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ApiError(400, f"{where}.role must be a string such as 'user'", param=f"{where}.role")
    for field in ("name", "tool_call_id"):
        if not isinstance(message.get(field), str | None):
            raise ApiError(400, f"{where}.{field} must be a string", param=f"{where}.{field}")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ApiError(400, f"{where}.tool_calls must be a list of objects", param=f"{where}.tool_calls")
    if "content" not in message and message["role"] != "assistant":
        raise ApiError(400, f"{where} has no content; give a string", param=f"{where}.content")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ApiError(400, f"{where}.content must be a string, a list of parts, or null", param=f"{where}.content")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            text = f"{where}.content holds a part of type {str(kind)[:100]!r}; only text parts are served"
            raise ApiError(400, text, param=f"{where}.content")


def _check_tool(index: int, tool: dict[str, Any]) -> None:
    """Tools are passed on as they came: a template prints them, and the order of keys is part of the prompt."""
    where = f"tools.{index}"
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ApiError(400, f"{where} must be {{'type': 'function', 'function': {{...}}}}", param=where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ApiError(400, f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise ApiError(400, f"{where}.function.parameters must be an object", param=f"{where}.function.parameters")


class ChatRequest(ChatPromptFields, SamplingFields):
    """Body of POST /v1/chat/completions."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool = False
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and self.top_logprobs > 0 and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs=true; set it or leave it out", param="top_logprobs")
        if isinstance(self.tool_choice, dict) or self.tool_choice == "required":
            wanted = "a named function" if isinstance(self.tool_choice, dict) else "'required'"
            message = f"tool_choice {wanted} needs a tool parser, and none is configured; use 'auto' or 'none'"
            raise ApiError(400, message, param="tool_choice", code="unsupported_field")
        return self


class TokenizeRequest(_Body):
    """Body of POST /tokenize: `prompt`, or `messages` with the template fields of chat completions."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


async def read_body(request: Request, shape: type[Body]) -> Body:
    """The request's JSON body as `shape`, whatever its content type says.

    Raises:
        ApiError: 400, naming the first field at fault.
    """
    raw = await request.body()
    try:
        return shape.model_validate_json(raw)
    except ValidationError as error:
        raise first_problem(error) from None
