"""Servers with one bug each: `python -m core_conformance.mutants.serve NAME serve MODEL ...`.

A server is a process of its own, so that its bug is planted there, by name, before `core serve` runs.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

__all__ = ["BUGS", "main"]


@contextmanager
def _usage_off_by_one() -> Iterator[None]:
    """One completion token too many is counted."""
    from core.serve.choices import Usage

    honest = Usage.json

    def json(self: Usage) -> dict[str, Any]:
        self.completion_tokens += 1
        try:
            return honest(self)
        finally:
            self.completion_tokens -= 1

    with mock.patch.object(Usage, "json", json):
        yield


@contextmanager
def _cached_never_told() -> Iterator[None]:
    from core.serve.choices import Usage

    honest = Usage.add

    def add(self: Usage, prompt_index: int, output: Any) -> None:
        output.num_cached_tokens = 0
        honest(self, prompt_index, output)

    with mock.patch.object(Usage, "add", add):
        yield


@contextmanager
def _no_final_usage() -> Iterator[None]:
    """A stream never ends with its usage."""
    from core.serve.protocol import CompletionRequest

    with mock.patch.object(CompletionRequest, "include_usage", property(lambda self: False)):
        yield


@contextmanager
def _no_done() -> Iterator[None]:
    """A stream just ends."""
    with mock.patch("core.serve.completions.DONE", b""), mock.patch("core.serve.chat.DONE", b""):
        yield


@contextmanager
def _delta(change: Callable[[Any], None]) -> Iterator[None]:
    """What a choice brings is changed on its way out."""
    from core.engine.choice import Choice

    honest = Choice.take_delta

    def take_delta(self: Choice) -> Any:
        delta = honest(self)
        change(delta)
        return delta

    with mock.patch.object(Choice, "take_delta", take_delta):
        yield


def _always_stop(delta: Any) -> None:
    from core.outputs import FinishReason

    if delta.finish_reason is FinishReason.LENGTH:
        delta.finish_reason = FinishReason.STOP


def _no_stop_reason(delta: Any) -> None:
    delta.stop_reason = None


def _first_choice(delta: Any) -> None:
    delta.index = 0


_said = [0]


def _a_letter_lost(delta: Any) -> None:
    """Every fortieth piece of text is lost."""
    _said[0] += 1
    if _said[0] % 40 == 0:
        delta.text = ""


@contextmanager
def _prompts_collide() -> Iterator[None]:
    """Outputs of several prompts come under the first one."""
    from core.serve import completions, stream

    honest = stream.merge

    async def merge(sources: Any) -> AsyncGenerator[tuple[int, Any], None]:
        async with contextlib.aclosing(honest(sources)) as outputs:
            async for _, output in outputs:
                yield 0, output

    with mock.patch.object(completions, "merge", merge):
        yield


@contextmanager
def _any_model() -> Iterator[None]:
    """Requests for models that are not served are answered by the one that is."""
    from core.serve.state import ServerState

    with mock.patch.object(ServerState, "check_model", return_value=None):
        yield


@contextmanager
def _no_param() -> Iterator[None]:
    """Errors do not name the field."""
    from core.serve import errors

    honest = errors.error_body
    body = lambda message, kind, param, code: honest(message, kind, None, code)  # noqa: E731
    with mock.patch.object(errors, "error_body", body):
        yield


@contextmanager
def _leavers_unnoticed() -> Iterator[None]:
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
def _counted_twice() -> Iterator[None]:
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
def _descriptor_kept() -> Iterator[None]:
    """Each request leaves a descriptor open."""
    from core.serve.metrics import RequestRecord

    honest = RequestRecord.finish

    def finish(self: RequestRecord, last: Any) -> None:
        _kept.append(socket.socket())
        honest(self, last)

    with mock.patch.object(RequestRecord, "finish", finish):
        yield


@contextmanager
def _streams_mixed_up() -> Iterator[None]:
    """Where many requests have news in one step, the first two get each other's."""
    from core.engine.output_processor import OutputProcessor

    honest = OutputProcessor.process

    def process(self: OutputProcessor, outputs: Any) -> Any:
        if len(outputs) >= 24 and len(outputs[0].new_token_ids) == len(outputs[1].new_token_ids) == 1:
            first, second = outputs[0], outputs[1]
            first.new_token_ids, second.new_token_ids = second.new_token_ids, first.new_token_ids
        return honest(self, outputs)

    with mock.patch.object(OutputProcessor, "process", process):
        yield


@contextmanager
def _no_drain() -> Iterator[None]:
    """At SIGTERM the server ends at once."""
    from core.serve import server

    async def drain(*args: Any) -> None:
        return None

    with mock.patch.object(server, "_drain", drain):
        yield


@contextmanager
def _loading_is_healthy() -> Iterator[None]:
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
def _queue_without_end() -> Iterator[None]:
    """The bound of the queue is not taken over."""
    if "--max-num-queued-reqs" in sys.argv:
        place = sys.argv.index("--max-num-queued-reqs")
        del sys.argv[place : place + 2]
    yield


BUGS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "served usage one token too many": ("wire/completions", _usage_off_by_one),
    "cached tokens never told": ("wire/cached-tokens", _cached_never_told),
    "stream without its final usage": ("wire/stream-usage", _no_final_usage),
    "stream without [DONE]": ("wire/chat-plain", _no_done),
    "finish_reason always stop": ("wire/chat-plain", lambda: _delta(_always_stop)),
    "stop_reason not told": ("wire/chat-stop", lambda: _delta(_no_stop_reason)),
    "every choice is the first": ("wire/completions-choices", lambda: _delta(_first_choice)),
    "outputs of prompts collide": ("wire/completions-prompts", _prompts_collide),
    "served tokens counted twice": ("wire/metrics", _counted_twice),
    "any model's name is taken": ("errors/request-unknown-model", _any_model),
    "errors do not name the field": ("errors/request-no-prompt", _no_param),
    "client that leaves is not noticed": ("cancel", _leavers_unnoticed),
    "streams mixed up when many run": ("streams", _streams_mixed_up),
    "descriptor kept for each request": ("soak", _descriptor_kept),
    "queue without an end": ("overload/queue-full", _queue_without_end),
    "loading server told as dead": ("life/loading", _loading_is_healthy),
    "no drain at SIGTERM": ("life/drain", _no_drain),
    "pieces of text lost": ("accuracy", lambda: _delta(_a_letter_lost)),
}
"""Name to the head of the ids that must find it, without the level, and the bug."""


def main() -> None:
    """`core` with the bug that the first argument names."""
    from core.cli import main as core

    name = sys.argv.pop(1)
    with BUGS[name][1]():
        core()


if __name__ == "__main__":
    main()
