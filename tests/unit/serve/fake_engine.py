"""A scripted engine with the real checks of requests: what it says is set by the test, how long it takes too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from core.engine.input_processor import InputProcessor, ProcessedRequest
from core.errors import CoreError, EngineDeadError, QueueFullError, TemplateError
from core.outputs import (
    CompletionOutput,
    EngineStats,
    FinishReason,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from core.sampling_params import SamplingParams

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL = {BOS: "<bos>", EOS: "<eos>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
FRAGMENTS = {300: b"\xf0", 301: b"\x9f", 302: b"\xe2\x82"}
VOCAB_SIZE = 1000


class FakeTokenizer:
    """One id a byte, four specials, three byte fragments, and `w400`-like words."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        while text:
            for special, name in SPECIAL.items():
                if text.startswith(name):
                    ids.append(special)
                    text = text[len(name) :]
                    break
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        if token_id in SPECIAL:
            return SPECIAL[token_id].encode()
        return FRAGMENTS.get(token_id) or f"w{token_id}".encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in token_ids if not (skip_special_tokens and i in SPECIAL)]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", "replace")


class FakeTemplate:
    """ChatML that emits the BOS itself; the text of messages never becomes a special token unless trusted."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def render_ids(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.calls.append({"messages": messages, **options})
        if any(message["role"] == "narrator" for message in messages):
            raise TemplateError("this template knows no role 'narrator'; use 'user'")
        ids = [BOS]
        for index, message in enumerate(messages):
            content = message.get("content") or ""
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            ids += [IM_START, *f"{message['role']}\n".encode(), *text.encode()]
            if not (options.get("continue_final_message") and index == len(messages) - 1):
                ids.append(IM_END)
        return [*ids, IM_START, *b"assistant\n"] if options.get("add_generation_prompt") else ids


def _grow(so_far: dict[int, CompletionOutput], news: CompletionOutput) -> None:
    known = so_far.setdefault(news.index, CompletionOutput(index=news.index))
    known.text += news.text
    known.token_ids += news.token_ids
    known.logprobs = [*(known.logprobs or ()), *(news.logprobs or ())]
    known.finish_reason, known.stop_reason = news.finish_reason, news.stop_reason


Reply = Callable[[ProcessedRequest, int], Sequence[int]]


def endless(request: ProcessedRequest, choice: int) -> Sequence[int]:
    """Letters, choice 0 in 'a', choice 1 in 'b', ..., until the token limit."""
    return [ord("a") + choice] * 100_000


def says(text: str) -> Reply:
    """The text, then EOS."""
    return lambda request, choice: [*text.encode(), EOS]


@dataclass
class FakeEngine:
    """Has the methods of AsyncEngine. A request runs as one task: a token a choice every `step_s` seconds."""

    reply: Reply = endless
    step_s: float = 0.0
    max_model_len: int = 512
    cached_tokens: int = 0
    fails_after: int | None = None
    error: CoreError | None = None
    queued: asyncio.Event | None = None
    """Where set, requests wait for it before their first token."""
    candidates: Sequence[int] = (97, 98, 300, 301, 302)
    state: str = "healthy"
    reason: str = ""
    running: int = 0
    waiting: int = 0
    steps: int = 0
    aborted: int = 0
    drained: bool = False
    closed: bool = False
    seen: list[ProcessedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = FakeTokenizer()
        self.template = FakeTemplate()
        self.facts = SimpleNamespace(
            model="fake", max_model_len=self.max_model_len, vocab_size=VOCAB_SIZE, block_size=16, resolved="fake device"
        )
        self._inputs = InputProcessor(
            self.tokenizer,  # type: ignore[arg-type]
            vocab_size=VOCAB_SIZE,
            max_model_len=self.max_model_len,
            max_logprobs=20,
            eos_token_ids=(EOS,),
        )

    @property
    def health(self) -> Any:
        return SimpleNamespace(state=self.state, reason=self.reason)

    def stats(self) -> EngineStats:
        return EngineStats(num_requests_running=self.running, num_requests_waiting=self.waiting, num_blocks=64)

    async def drain(self, timeout: float) -> bool:
        self.drained = True
        end = asyncio.get_running_loop().time() + timeout
        while self.running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        return not self.running

    async def shutdown(self) -> None:
        self.closed = True

    async def reset_prefix_cache(self) -> bool:
        return True

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str | None = None, **labels: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        if self.state != "healthy":
            raise EngineDeadError(f"the engine is {self.state}: {self.reason}")
        if isinstance(self.error, QueueFullError):
            raise self.error
        delta = labels.pop("delta", True)
        request = self._inputs.process(prompt, params, request_id=request_id, **labels)
        self.seen.append(request)
        finished = False
        self.waiting += 1
        waiting = True
        try:
            if self.queued is not None:
                await self.queued.wait()
            self.waiting -= 1
            waiting = False
            self.running += 1
            so_far: dict[int, CompletionOutput] = {}
            async for output in self._run(request):
                finished = output.finished
                if not delta:
                    for choice in output.outputs:
                        _grow(so_far, choice)
                    output.outputs = [so_far[index] for index in sorted(so_far)]
                yield output
        finally:
            if waiting:
                self.waiting -= 1
            else:
                self.running -= 1
            if not finished:
                self.aborted += 1

    async def _run(self, request: ProcessedRequest) -> AsyncGenerator[RequestOutput, None]:
        times = RequestMetrics(arrival_time=request.arrival_time, scheduled_time=request.arrival_time)
        replies = [list(self.reply(request, index)) for index in range(request.params.n)]
        limit = request.params.max_tokens or 0
        open_choices = list(range(request.params.n))
        step = 0
        while open_choices:
            await asyncio.sleep(self.step_s)
            if self.fails_after is not None and step >= self.fails_after:
                raise self.error or EngineDeadError("the engine process was ended; the request is lost, send it again")
            self.steps += 1
            news = [self._choice(request, replies[index], index, step, limit) for index in open_choices]
            open_choices = [out.index for out in news if out.finish_reason is None]
            step += 1
            times.first_token_time = times.first_token_time or times.arrival_time
            times.last_token_time = times.first_token_time
            yield RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_token_ids=request.prompt_token_ids,
                outputs=news,
                finished=not open_choices,
                prompt_logprobs=self._prompt_logprobs(request),
                num_cached_tokens=self.cached_tokens,
                metrics=times,
            )

    def _choice(
        self, request: ProcessedRequest, reply: list[int], index: int, step: int, limit: int
    ) -> CompletionOutput:
        if limit == 0:
            return CompletionOutput(index=index, finish_reason=FinishReason.LENGTH)
        token_id = reply[step]
        out = CompletionOutput(index=index, token_ids=[token_id])
        if request.params.logprobs is not None:
            out.logprobs = [self._logprobs(token_id, request.params.logprobs)]
        if token_id in (EOS, *request.params.stop_token_ids) and not request.params.ignore_eos:
            out.finish_reason = FinishReason.STOP
            out.stop_reason = token_id if token_id != EOS else None
        else:
            out.text = self.tokenizer.decode([token_id])
            if step + 1 >= limit:
                out.finish_reason = FinishReason.LENGTH
        return out

    def _logprobs(self, token_id: int, top: int) -> PositionLogprobs:
        best = tuple(self.candidates[:top])
        logprobs = tuple(-0.5 * (rank + 1) for rank in range(len(best)))
        known = dict(zip(best, logprobs, strict=True))
        return PositionLogprobs((token_id, *best), (known.get(token_id, -9.0), *logprobs), 1)

    def _prompt_logprobs(self, request: ProcessedRequest) -> list[PositionLogprobs | None] | None:
        top = request.params.prompt_logprobs
        if top is None:
            return None
        return [None, *(self._logprobs(token_id, top) for token_id in request.prompt_token_ids[1:])]
