"""POST /v1/chat/completions."""

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
from core.serve.logprobs import TokenTexts, chat_logprobs, prompt_logprobs_json
from core.serve.params import chat_params
from core.serve.prompts import naming
from core.serve.protocol import ChatRequest, read_body
from core.serve.state import RequestLabels, ServerState, server_state
from core.serve.stream import DONE, EventStream, merge, unless_disconnected

__all__ = ["create_chat_completion"]

to_json = msgspec.json.encode


async def create_chat_completion(request: Request) -> Response:
    """The assistant's next message; see docs/serving.md for the fields."""
    state = server_state(request)
    body = await read_body(request, ChatRequest)
    state.admit(body.model)
    state.check_priority(body.priority)
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs is not available in a stream; use stream=false", param="prompt_logprobs")
    run = _Run(state, body, chat_params(body), state.labels(body, request, "chatcmpl"))
    if body.stream:
        return EventStream(run.events())
    answer = await unless_disconnected(run.answer(), request.receive)
    return Response(answer, 200 if answer is not None else 499, media_type="application/json")


class _Run:
    """One conversation on its way through the engine."""

    def __init__(self, state: ServerState, body: ChatRequest, params: SamplingParams, labels: RequestLabels) -> None:
        self.state = state
        self.body = body
        self.params = params
        self.labels = labels
        self.texts = TokenTexts(state.engine.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self.usage = Usage()
        self._head = to_json(labels.public_id), to_json(body.model or state.names[0])

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        with self.state.counted(), naming({"prompt": "messages", "logprobs": "top_logprobs"}):
            prompt = await self.state.renderer.render(self.body)
            sources = self.state.generate_all([prompt], self.params, self.body, self.labels)
            async with contextlib.aclosing(merge(sources)) as outputs:
                async for item in outputs:
                    yield item

    async def answer(self) -> bytes:
        """The whole answer as JSON."""
        choices, usage, firsts = await collect(self._outputs(), self.params.n)
        shown: dict[str, Any] = {
            "id": self.labels.public_id,
            "object": "chat.completion",
            "created": self.labels.created,
            "model": self.body.model or self.state.names[0],
            "choices": [self._choice(choice) for choice in choices],
            "usage": usage.json(),
        }
        if self.body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs_json(firsts[0].prompt_logprobs or (), self.texts)
        if self.body.return_token_ids:
            shown["prompt_token_ids"] = firsts[0].prompt_token_ids
        return to_json(shown)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": self._echo() + choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.logprobs:
            shown["logprobs"] = chat_logprobs(choice.logprobs, self.texts, self.body.top_logprobs or 0)
        if self.body.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _echo(self) -> str:
        """Text of the final message, where `echo` asks for it and the answer continues it."""
        last = self.body.messages[-1]
        if not self.body.echo or last["role"] != "assistant":
            return ""
        content = last.get("content") or ""
        return content if isinstance(content, str) else "\n".join(part["text"] for part in content)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: roles, deltas, usage where asked for, the end."""
        begun = False
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                self.usage.add(prompt_index, output)
                if not begun:
                    begun = True
                    yield b"".join(self._role(index, output) for index in range(self.params.n))
                for delta in output.outputs:
                    yield self._event(delta)
        if self.body.include_usage:
            yield self._wrap(b'"choices":[],"usage":' + to_json(self.usage.json()))
        yield DONE

    def _role(self, index: int, output: RequestOutput) -> bytes:
        """The first chunk of a choice."""
        extra = b',"usage":' + to_json(Usage.start(output)) if self.body.continuous_usage else b""
        if index == 0 and self.body.return_token_ids:
            extra += b',"prompt_token_ids":' + to_json(output.prompt_token_ids)
        delta = b'{"role":"assistant","content":%b}' % to_json(self._echo())
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta)
        return self._wrap(b'"choices":[%b]%b' % (choice, extra))

    def _event(self, delta: CompletionOutput) -> bytes:
        """One chunk with what is new of a choice."""
        logprobs = b"null"
        if self.body.logprobs:
            logprobs = to_json(chat_logprobs(delta.logprobs or (), self.texts, self.body.top_logprobs or 0))
        finish = b"null"
        if delta.finish_reason is not None:
            check_finish(delta)
            finish = to_json(delta.finish_reason) + b',"stop_reason":' + to_json(delta.stop_reason)
        extra = b',"token_ids":' + to_json(delta.token_ids) if self.body.return_token_ids else b""
        usage = b',"usage":' + to_json(self.usage.json()) if self.body.continuous_usage else b""
        return self._wrap(
            b'"choices":[{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":%b%b}]%b'
            % (delta.index, to_json(delta.text), logprobs, finish, extra, usage)
        )

    def _wrap(self, rest: bytes) -> bytes:
        public_id, model = self._head
        return b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,%b}\n\n' % (
            public_id,
            self.labels.created,
            model,
            rest,
        )
