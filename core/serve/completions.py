"""POST /v1/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from core.outputs import CompletionOutput, RequestOutput
from core.sampling_params import SamplingParams
from core.serve.choices import Choice, Usage, check_finish, collect
from core.serve.errors import ApiError
from core.serve.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs_json
from core.serve.params import completion_params
from core.serve.prompts import encode_prompts, naming
from core.serve.protocol import CompletionRequest, read_body
from core.serve.state import RequestLabels, ServerState, server_state
from core.serve.stream import DONE, EventStream, merge, unless_disconnected

__all__ = ["create_completion"]

to_json = msgspec.json.encode


async def create_completion(request: Request) -> Response:
    """Text that continues each prompt; see docs/serving.md for the fields."""
    state = server_state(request)
    body = await read_body(request, CompletionRequest)
    state.admit(body.model)
    state.check_priority(body.priority)
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not available in a stream; use stream=false, or echo with logprobs"
        raise ApiError(400, message, param="prompt_logprobs")
    run = _Run(state, body, completion_params(body), state.labels(body, request, "cmpl"))
    if body.stream:
        return EventStream(run.events())
    answer = await unless_disconnected(run.answer(), request.receive)
    return Response(answer, 200 if answer is not None else 499, media_type="application/json")


class _Run:
    """One request on its way through the engine."""

    def __init__(
        self, state: ServerState, body: CompletionRequest, params: SamplingParams, labels: RequestLabels
    ) -> None:
        self.state = state
        self.body = body
        self.params = params
        self.labels = labels
        self.texts = TokenTexts(state.engine.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self.usage = Usage()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._head = to_json(labels.public_id), to_json(body.model or state.names[0])

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        with self.state.counted(), naming({"messages": "prompt", "prompt_logprobs": self._prompt_logprobs_field}):
            prompts = await encode_prompts(self.state.engine, self.body.prompt, self.body.add_special_tokens)
            sources = self.state.generate_all(prompts, self.params, self.body, self.labels)
            async with contextlib.aclosing(merge(sources)) as outputs:
                async for item in outputs:
                    yield item

    @property
    def _prompt_logprobs_field(self) -> str:
        return "logprobs" if self.body.prompt_logprobs is None else "prompt_logprobs"

    async def answer(self) -> bytes:
        """The whole answer as JSON."""
        choices, usage, _ = await collect(self._outputs(), self.params.n)
        return to_json(
            {
                "id": self.labels.public_id,
                "object": "text_completion",
                "created": self.labels.created,
                "model": self.body.model or self.state.names[0],
                "choices": [self._choice(choice) for choice in choices],
                "usage": usage.json(),
            }
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        prompt_index = choice.index // self.params.n
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": self._echo(prompt_index, choice.output) + choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.logprobs is not None:
            delta = CompletionOutput(index=0, token_ids=choice.token_ids, logprobs=choice.logprobs)
            shown["logprobs"] = self._delta_logprobs(choice.index, delta, choice.output)
        if self.body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs_json(choice.output.prompt_logprobs or (), self.texts)
        if self.body.return_token_ids:
            shown["prompt_token_ids"] = choice.output.prompt_token_ids
            shown["token_ids"] = choice.token_ids
        return shown

    def _echo(self, prompt_index: int, output: RequestOutput) -> str:
        if not self.body.echo:
            return ""
        given = self.body.prompt[prompt_index]
        return given if isinstance(given, str) else self._decode(output.prompt_token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text = self.state.engine.tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)
        return str(text)

    def _delta_logprobs(self, index: int, delta: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """Logprobs of the new tokens of choice `index`; with echo, those of the prompt before them."""
        assert self.body.logprobs is not None
        logprobs = self._logprobs.get(index)
        if logprobs is None:
            logprobs = self._logprobs[index] = CompletionLogprobs(self.texts, self.body.logprobs)
            if self.body.echo:
                self._add_prompt(logprobs, index, output)
        for token_id, entry in zip(delta.token_ids, delta.logprobs or (), strict=True):
            logprobs.add(token_id, entry)
        return logprobs.take()

    def _add_prompt(self, logprobs: CompletionLogprobs, index: int, output: RequestOutput) -> None:
        text = self._echo(index // self.params.n, output)
        tokenizer = self.state.engine.tokenizer
        entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        for token_id, entry in zip(output.prompt_token_ids, entries, strict=True):
            hidden = self.params.skip_special_tokens and tokenizer.is_special(token_id)
            logprobs.add(token_id, entry, hidden=hidden)
        logprobs.jump(len(text))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events."""
        firsts: dict[int, RequestOutput] = {}
        seen: set[int] = set()
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                self.usage.add(prompt_index, output)
                first = firsts.setdefault(prompt_index, output)
                for delta in output.outputs:
                    index = prompt_index * self.params.n + delta.index
                    delta.index = index
                    yield self._event(delta, None if index in seen else first)
                    seen.add(index)
        if self.body.include_usage:
            yield self._wrap(b'"choices":[],"usage":' + to_json(self.usage.json()))
        yield DONE

    def _event(self, delta: CompletionOutput, first: RequestOutput | None) -> bytes:
        """One chunk; `first` is the prompt's first output where this is the choice's first chunk."""
        text = delta.text
        extra = b""
        if first is not None:
            text = self._echo(delta.index // self.params.n, first) + text
            if self.body.return_token_ids:
                extra += b',"prompt_token_ids":' + to_json(first.prompt_token_ids)
        if self.body.return_token_ids:
            extra += b',"token_ids":' + to_json(delta.token_ids)
        logprobs = b"null"
        if self.body.logprobs is not None:
            logprobs = to_json(self._delta_logprobs(delta.index, delta, first or _NO_PROMPT))
        finish = b'null,"stop_reason":null'
        if delta.finish_reason is not None:
            check_finish(delta)
            finish = to_json(delta.finish_reason) + b',"stop_reason":' + to_json(delta.stop_reason)
        usage = b',"usage":' + to_json(self.usage.json()) if self.body.continuous_usage else b""
        return self._wrap(
            b'"choices":[{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}]%b'
            % (delta.index, to_json(text), logprobs, finish, extra, usage)
        )

    def _wrap(self, rest: bytes) -> bytes:
        public_id, model = self._head
        return b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,%b}\n\n' % (
            public_id,
            self.labels.created,
            model,
            rest,
        )


_NO_PROMPT = RequestOutput(request_id="", prompt=None, prompt_token_ids=[], outputs=[])
