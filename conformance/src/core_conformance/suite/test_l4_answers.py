"""L4: every field of every answer, streamed and not, against the wire format and the copy model's known answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core_conformance.checks import check
from core_conformance.records import Findings
from core_conformance.served.copying import STOP, STOP_CAUSE, copy_answer, copy_prompt, ids_of
from core_conformance.served.server import MODEL_NAME, Server
from core_conformance.served.streams import Streamed, read_stream
from core_conformance.served.wire import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    TextChoice,
    Usage,
    parse,
)
from core_conformance.subject import Mismatch

_COUNT = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request with an answer that is known.

    Args:
        prompts: As text, all of one length.
        body: Fields besides model, prompt or messages.
        texts: Text of each choice.
        tokens: Completion tokens of each choice.
        finish: `finish_reason` of each.
        stop_reason: Of each.
    """

    prompts: tuple[str, ...]
    body: dict[str, Any] = field(default_factory=dict)
    texts: tuple[str, ...]
    tokens: int = _COUNT
    finish: str = "length"
    stop_reason: int | str | None = None

    def request(self, *, chat: bool, stream: bool) -> dict[str, Any]:
        """The body."""
        given: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "ignore_eos": True}
        given |= {"max_tokens": _COUNT, **self.body}
        if chat:
            messages = [{"role": "user", "content": part} for part in self.prompts]
            given["messages"] = messages
        else:
            given.setdefault("prompt", list(self.prompts) if len(self.prompts) > 1 else self.prompts[0])
        if stream:
            given |= {"stream": True, "stream_options": {"include_usage": True}}
        return given


_PROMPT = copy_prompt(61, seed=1)
_ANSWER = copy_answer(_PROMPT, _COUNT)
_OTHER = copy_prompt(61, seed=2)
_STOPPED = _PROMPT[:-31] + STOP_CAUSE + _PROMPT[-30:]  # the eighth token of the answer is STOP
_STOPPED_ANSWER = copy_answer(_STOPPED, _COUNT)
_STOP_AT = _STOPPED_ANSWER.index(STOP)

_COMMON = {
    "plain": Case(prompts=(_PROMPT,), texts=(_ANSWER,)),
    "one-token": Case(prompts=(_PROMPT,), body={"max_tokens": 1}, texts=(_ANSWER[:1],), tokens=1),
    "choices": Case(prompts=(_PROMPT,), body={"n": 3}, texts=(_ANSWER,) * 3),
    "stop": Case(
        prompts=(_STOPPED,),
        body={"stop": [STOP]},
        texts=(_STOPPED_ANSWER[:_STOP_AT],),
        tokens=_STOP_AT + 1,
        finish="stop",
        stop_reason=STOP,
    ),
    "stop-kept": Case(
        prompts=(_STOPPED,),
        body={"stop": STOP, "include_stop_str_in_output": True},
        texts=(_STOPPED_ANSWER[: _STOP_AT + 1],),
        tokens=_STOP_AT + 1,
        finish="stop",
        stop_reason=STOP,
    ),
    "stop-id": Case(
        prompts=(_STOPPED,),
        body={"stop_token_ids": [ids_of(STOP)[0]]},
        texts=(_STOPPED_ANSWER[:_STOP_AT],),
        tokens=_STOP_AT + 1,
        finish="stop",
        stop_reason=ids_of(STOP)[0],
    ),
    "token-ids": Case(prompts=(_PROMPT,), body={"return_token_ids": True}, texts=(_ANSWER,)),
    "sampled": Case(prompts=(_PROMPT,), body={"temperature": 1.0, "top_p": 0.9, "seed": 7}, texts=(_ANSWER,)),
}
_COMPLETIONS = {
    **_COMMON,
    "ids": Case(prompts=(_PROMPT,), body={"prompt": list(ids_of(_PROMPT))}, texts=(_ANSWER,)),
    "prompts": Case(prompts=(_PROMPT, _OTHER), texts=(_ANSWER, copy_answer(_OTHER, _COUNT))),
    "prompts-choices": Case(
        prompts=(_PROMPT, _OTHER), body={"n": 2}, texts=(_ANSWER,) * 2 + (copy_answer(_OTHER, _COUNT),) * 2
    ),
    "echo": Case(prompts=(_PROMPT,), body={"echo": True}, texts=(_PROMPT + _ANSWER,)),
    "logprobs": Case(prompts=(_PROMPT,), body={"logprobs": 2}, texts=(_ANSWER,)),
    "echo-logprobs": Case(prompts=(_PROMPT,), body={"echo": True, "logprobs": 1}, texts=(_PROMPT + _ANSWER,)),
}
_CHATS = {
    **_COMMON,
    "messages": Case(prompts=(_PROMPT, _OTHER), texts=(copy_answer(_OTHER, _COUNT),)),
    "logprobs": Case(prompts=(_PROMPT,), body={"logprobs": True, "top_logprobs": 3}, texts=(_ANSWER,)),
    "max-completion-tokens": Case(
        prompts=(_PROMPT,), body={"max_tokens": 3, "max_completion_tokens": _COUNT}, texts=(_ANSWER,)
    ),
}


def _wrong(what: str, got: object, expected: object) -> Mismatch:
    return Mismatch(f"{what} is {got!r}, expected {expected!r}")


def _must_be(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise _wrong(what, got, expected)


def _check_usage(case: Case, usage: Usage | None, what: str) -> None:
    if usage is None:
        raise Mismatch(f"{what}: there is no usage, which stream_options asked for")
    _must_be(f"{what}: usage.prompt_tokens", usage.prompt_tokens, sum(len(prompt) for prompt in case.prompts))
    _must_be(f"{what}: usage.completion_tokens", usage.completion_tokens, case.tokens * len(case.texts))


def _said(answer: Completion | ChatCompletion) -> list[tuple[TextChoice | ChatChoice, str | None]]:
    if isinstance(answer, ChatCompletion):
        return [(choice, choice.message.content) for choice in answer.choices]
    return [(choice, choice.text) for choice in answer.choices]


def _check_choices(case: Case, answer: Completion | ChatCompletion, what: str) -> None:
    _must_be(f"{what}: model", answer.model, MODEL_NAME)
    _must_be(f"{what}: indices", [choice.index for choice in answer.choices], [*range(len(case.texts))])
    for (choice, said), text in zip(_said(answer), case.texts, strict=True):
        _must_be(f"{what}: text of choice {choice.index}", said, text)
        _must_be(f"{what}: finish_reason", choice.finish_reason, case.finish)
        _must_be(f"{what}: stop_reason", choice.stop_reason, case.stop_reason)
        if case.body.get("return_token_ids"):
            _must_be(f"{what}: token_ids", tuple(choice.token_ids or ()), ids_of(text))
    _check_usage(case, answer.usage, what)


def _check_stream(case: Case, stream: Streamed, what: str) -> None:
    _must_be(f"{what}: model", stream.chunks[0].model, MODEL_NAME)
    _must_be(f"{what}: texts", stream.texts, dict(enumerate(case.texts)))
    _must_be(f"{what}: finish reasons", stream.finish_reasons, dict.fromkeys(range(len(case.texts)), case.finish))
    if case.body.get("return_token_ids"):
        ids = {index: [*ids_of(text)] for index, text in enumerate(case.texts)}
        _must_be(f"{what}: token_ids", stream.token_ids, ids)
    _check_usage(case, stream.usage, what)


def _check_text_logprobs(case: Case, answer: Completion, what: str) -> None:
    for choice in answer.choices:
        wanted = case.body.get("logprobs")
        if wanted is None:
            _must_be(f"{what}: logprobs", choice.logprobs, None)
            continue
        if choice.logprobs is None:
            raise Mismatch(f"{what}: logprobs were asked for and are null")
        _must_be(f"{what}: logprobs.tokens", "".join(choice.logprobs.tokens), choice.text)
        _must_be(f"{what}: logprobs.text_offset", choice.logprobs.text_offset, [*range(len(choice.text))])
        own = choice.logprobs.token_logprobs[-_COUNT:]
        if any(value is None or value < -1e-3 for value in own):
            raise Mismatch(f"{what}: the copy model is sure of each token, and token_logprobs are {own}")
        for top in (choice.logprobs.top_logprobs or ())[-_COUNT:]:
            if top is None or not wanted <= len(top) <= wanted + 1:
                raise Mismatch(f"{what}: top_logprobs of a token are {top}, {wanted} were asked for")


def _check_chat_logprobs(case: Case, answer: ChatCompletion, what: str) -> None:
    for choice in answer.choices:
        if not case.body.get("logprobs"):
            _must_be(f"{what}: logprobs", choice.logprobs, None)
            continue
        content = (choice.logprobs.content if choice.logprobs else None) or []
        _must_be(f"{what}: tokens of logprobs", "".join(token.token for token in content), choice.message.content)
        for token in content:
            _must_be(f"{what}: number of top_logprobs", len(token.top_logprobs), case.body["top_logprobs"])
            _must_be(f"{what}: best of top_logprobs", token.top_logprobs[0].token, token.token)
            _must_be(f"{what}: bytes", bytes(token.bytes or ()), token.token.encode())


@check("L4/wire/completions", _COMPLETIONS)
def test_completions(server: Server, variant: Case) -> None:
    """Text, ids or several prompts: fields, text, log-probabilities, finish reason and usage, streamed and not."""
    reply = server.post("/v1/completions", variant.request(chat=False, stream=False))
    _must_be("status of a completion", (reply.status_code, reply.text[:300] * (reply.status_code != 200)), (200, ""))
    answer = parse(Completion, reply.content, "completion")
    _check_choices(variant, answer, "completion")
    _check_text_logprobs(variant, answer, "completion")
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=variant.request(chat=False, stream=True)) as stream,
    ):
        _check_stream(variant, read_stream(stream, CompletionChunk, "streamed completion"), "streamed completion")


@check("L4/wire/chat", _CHATS)
def test_chat_completions(server: Server, variant: Case) -> None:
    """One or several messages: fields, content, log-probabilities, finish reason and usage, streamed and not."""
    reply = server.post("/v1/chat/completions", variant.request(chat=True, stream=False))
    _must_be(
        "status of a chat completion", (reply.status_code, reply.text[:300] * (reply.status_code != 200)), (200, "")
    )
    answer = parse(ChatCompletion, reply.content, "chat completion")
    _check_choices(variant, answer, "chat completion")
    _check_chat_logprobs(variant, answer, "chat completion")
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=variant.request(chat=True, stream=True)) as stream,
    ):
        _check_stream(variant, read_stream(stream, ChatChunk, "streamed chat"), "streamed chat")


@check("L4/wire/stream-usage", ["completions", "chat"])
def test_usage_in_a_stream_only_where_asked_for(server: Server, variant: str) -> None:
    """No usage by default, one at the end with include_usage, a growing one in each chunk with continuous stats."""
    chat = variant == "chat"
    path, shape = ("/v1/chat/completions", ChatChunk) if chat else ("/v1/completions", CompletionChunk)
    body = _COMMON["plain"].request(chat=chat, stream=True)
    counts = []
    for options in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        with server.client() as client, client.stream("POST", path, json={**body, "stream_options": options}) as reply:
            chunks = read_stream(reply, shape, f"stream_options {options}").chunks
        counts.append([None if chunk.usage is None else chunk.usage.completion_tokens for chunk in chunks])
    never, last, always = counts
    if any(value is not None for value in never):
        raise Mismatch(f"a stream without stream_options carries usage: {never}")
    if last[-1] != _COUNT or any(value is not None for value in last[:-1]):
        raise Mismatch(f"include_usage: completion tokens by chunk are {last}, expected {_COUNT} in the last one alone")
    grown = [value for value in always if value is not None]
    if always != sorted(grown) or grown[-1] != _COUNT:
        raise Mismatch(f"continuous_usage_stats: completion tokens by chunk are {always}, expected to grow to {_COUNT}")


@check("L4/wire/cached-tokens")
def test_cached_tokens_are_counted(server: Server, findings: Findings) -> None:
    """A prompt that was seen reports whole blocks of it as cached, one that was not reports none."""
    block_size = int(server.metric_labels("vllm:cache_config_info")["block_size"])
    prompt = copy_prompt(2 * block_size + 45, seed=77)
    found = []
    for text in (prompt, prompt, copy_prompt(2 * block_size + 45, seed=78)):
        body = {"model": MODEL_NAME, "prompt": text, "max_tokens": 4, "temperature": 0}
        answer = parse(Completion, server.post("/v1/completions", body).content, "completion")
        found.append(answer.usage.prompt_tokens_details.cached_tokens)
        _must_be("a copy, cached or not", answer.choices[0].text, copy_answer(text, 4))
    findings.notes["cached_tokens"] = found
    new, seen, other = found
    if new or other or seen % block_size or not block_size <= seen < len(prompt):
        raise Mismatch(f"cached_tokens of a new, a repeated and another prompt of {len(prompt)} tokens: {found}")
