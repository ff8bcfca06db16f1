"""Servers that serve wrongly: clients that leave, load, leaks, starts and ends. Imported by `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

__all__ = [
    "bodies_of_any_size",
    "counted_twice",
    "descriptor_kept",
    "ends_early",
    "few_streams_mixed_up",
    "leavers_unnoticed",
    "loading_is_dead",
    "long_prompts_held_back",
    "no_drain",
    "queue_without_end",
    "refused_requests_counted",
    "stops_forgotten",
    "streams_mixed_up",
    "tokens_held_back",
]


@contextmanager
def leavers_unnoticed() -> Iterator[None]:
    """A client that goes away is not noticed: its request runs to its end."""
    from core.serve import chat, completions, stream

    async def unless_disconnected(work: Any, receive: Any) -> Any:
        return await work

    with (
        mock.patch.object(stream, "unless_disconnected", unless_disconnected),
        mock.patch.object(completions, "unless_disconnected", unless_disconnected),
        mock.patch.object(chat, "unless_disconnected", unless_disconnected),
    ):
        yield


@contextmanager
def counted_twice() -> Iterator[None]:
    """Generated tokens move their counter twice."""
    from core.serve.metrics import RequestRecord

    honest = RequestRecord._choice

    def choice(self: RequestRecord, delta: Any, now: float) -> None:
        honest(self, delta, now)
        self._metrics.counters["generation_tokens"] += len(delta.token_ids)

    with mock.patch.object(RequestRecord, "_choice", choice):
        yield


_kept: list[socket.socket] = []


@contextmanager
def descriptor_kept() -> Iterator[None]:
    """Each request leaves a descriptor open."""
    from core.serve.metrics import RequestRecord

    honest = RequestRecord.finish

    def finish(self: RequestRecord, last: Any) -> None:
        _kept.append(socket.socket())
        honest(self, last)

    with mock.patch.object(RequestRecord, "finish", finish):
        yield


@contextmanager
def streams_mixed_up() -> Iterator[None]:
    """Where several requests have news in one step, the first two get each other's."""
    with _mixed_up(5, 1000):
        yield


@contextmanager
def few_streams_mixed_up() -> Iterator[None]:
    """The same where few have: as many as fit a pool that is too small for all."""
    with _mixed_up(2, 4):
        yield


@contextmanager
def _mixed_up(least: int, most: int) -> Iterator[None]:
    from core.engine.output_processor import OutputProcessor

    honest = OutputProcessor.process

    def process(self: OutputProcessor, outputs: Any) -> Any:
        if least <= len(outputs) <= most and len(outputs[0].new_token_ids) == len(outputs[1].new_token_ids) == 1:
            first, second = outputs[0], outputs[1]
            first.new_token_ids, second.new_token_ids = second.new_token_ids, first.new_token_ids
        return honest(self, outputs)

    with mock.patch.object(OutputProcessor, "process", process):
        yield


@contextmanager
def no_drain() -> Iterator[None]:
    """At SIGTERM the server ends at once."""
    from core.serve import server

    async def drain(*args: Any) -> None:
        return None

    with mock.patch.object(server, "_drain", drain):
        yield


@contextmanager
def loading_is_dead() -> Iterator[None]:
    """While the model loads, /health says that the engine is down."""
    from core.serve.errors import NotReadyError
    from core.serve.state import ServerState

    honest = ServerState.problem

    def problem(self: ServerState) -> Any:
        found = honest(self)
        return NotReadyError("the engine is dead", code="engine_dead") if found is not None else None

    with mock.patch.object(ServerState, "problem", problem):
        yield


@contextmanager
def queue_without_end() -> Iterator[None]:
    """The bound of the queue is not taken over."""
    if "--max-num-queued-reqs" in sys.argv:
        place = sys.argv.index("--max-num-queued-reqs")
        del sys.argv[place : place + 2]
    yield


@contextmanager
def bodies_of_any_size() -> Iterator[None]:
    """The bound of a body is a thousand times what it should be."""
    from core.serve.guard import BodyLimit

    honest = BodyLimit.__init__

    def init(self: BodyLimit, app: Any, limit: int) -> None:
        honest(self, app, 1000 * limit)

    with mock.patch.object(BodyLimit, "__init__", init):
        yield


@contextmanager
def refused_requests_counted() -> Iterator[None]:
    """A request that ends with an error stays in /load."""
    from core.serve.state import ServerState

    @contextmanager
    def counted(self: ServerState) -> Iterator[None]:
        self.num_requests += 1
        yield
        self.num_requests -= 1

    with mock.patch.object(ServerState, "counted", counted):
        yield


@contextmanager
def ends_early() -> Iterator[None]:
    """Answers have four fifths of the tokens that they may have."""
    from core.engine.input_processor import InputProcessor

    honest = InputProcessor._max_tokens

    def max_tokens(self: InputProcessor, params: Any, num_prompt_tokens: int) -> int:
        return max(1, honest(self, params, num_prompt_tokens) * 4 // 5)

    with mock.patch.object(InputProcessor, "_max_tokens", max_tokens):
        yield


@contextmanager
def stops_forgotten() -> Iterator[None]:
    """Stop strings of a request are not looked for."""
    from core.serve import params

    honest = params._build

    def build(body: Any, **limits: Any) -> Any:
        body.stop = []
        return honest(body, **limits)

    with mock.patch.object(params, "_build", build):
        yield


@contextmanager
def tokens_held_back() -> Iterator[None]:
    """Each piece of an answer comes half a second late."""
    with _held_back(0.5):
        yield


@contextmanager
def long_prompts_held_back() -> Iterator[None]:
    """The answer to a long prompt begins more than a minute late: below that the floor of prefill finds nothing."""
    with _held_back(80.0, least_tokens=500):
        yield


@contextmanager
def _held_back(seconds: float, *, least_tokens: int = 0) -> Iterator[None]:
    from core.engine.async_engine import AsyncEngine

    honest = AsyncEngine.generate

    async def generate(self: AsyncEngine, prompt: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with contextlib.aclosing(honest(self, prompt, *args, **kwargs)) as outputs:
            async for output in outputs:
                if len(prompt) >= least_tokens:
                    await asyncio.sleep(seconds)
                yield output

    with mock.patch.object(AsyncEngine, "generate", generate):
        yield
