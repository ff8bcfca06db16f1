"""Servers that answer wrongly: usage, ends, indices, fields of errors, what is told of models. Imported by `serve`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

__all__ = [
    "a_letter_lost",
    "always_stop",
    "any_model",
    "cached_never_told",
    "changes_each_time",
    "delta",
    "first_choice",
    "label_lost",
    "longer_than_it_is",
    "model_told",
    "no_done",
    "no_final_usage",
    "no_param",
    "no_stop_reason",
    "prompts_collide",
    "special_token_counted",
    "status_first",
    "usage_off_by_one",
]


@contextmanager
def usage_off_by_one() -> Iterator[None]:
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
def cached_never_told() -> Iterator[None]:
    """No token is told as cached."""
    from core.serve.choices import Usage

    honest = Usage.add

    def add(self: Usage, prompt_index: int, output: Any) -> None:
        output.num_cached_tokens = 0
        honest(self, prompt_index, output)

    with mock.patch.object(Usage, "add", add):
        yield


@contextmanager
def no_final_usage() -> Iterator[None]:
    """A stream never ends with its usage."""
    from core.serve.protocol import CompletionRequest

    with mock.patch.object(CompletionRequest, "include_usage", property(lambda self: False)):
        yield


@contextmanager
def no_done() -> Iterator[None]:
    """A stream just ends."""
    with mock.patch("core.serve.completions.DONE", b""), mock.patch("core.serve.chat.DONE", b""):
        yield


@contextmanager
def delta(change: Callable[[Any], None]) -> Iterator[None]:
    """What a choice brings is changed on its way out."""
    from core.engine.choice import Choice

    honest = Choice.take_delta

    def take_delta(self: Choice) -> Any:
        delta = honest(self)
        change(delta)
        return delta

    with mock.patch.object(Choice, "take_delta", take_delta):
        yield


def always_stop(delta: Any) -> None:
    """A full length is told as a stop."""
    from core.outputs import FinishReason

    if delta.finish_reason is FinishReason.LENGTH:
        delta.finish_reason = FinishReason.STOP


def no_stop_reason(delta: Any) -> None:
    """What stopped it is not told."""
    delta.stop_reason = None


def first_choice(delta: Any) -> None:
    """Every choice has index 0."""
    delta.index = 0


_said = [0]


def a_letter_lost(delta: Any) -> None:
    """Every fortieth piece of text is lost."""
    _said[0] += 1
    if _said[0] % 40 == 0:
        delta.text = ""


@contextmanager
def prompts_collide() -> Iterator[None]:
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
def any_model() -> Iterator[None]:
    """Requests for models that are not served are answered by the one that is."""
    from core.serve.state import ServerState

    with mock.patch.object(ServerState, "check_model", return_value=None):
        yield


@contextmanager
def no_param() -> Iterator[None]:
    """Errors do not name the field."""
    from core.serve import errors

    honest = errors.error_body
    body = lambda message, kind, param, code: honest(message, kind, None, code)  # noqa: E731
    with mock.patch.object(errors, "error_body", body):
        yield


@contextmanager
def model_told(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """What is told of one of the models is something else than in the list of all."""
    from core.serve import routes

    honest = routes._model

    def model(state: Any, name: str) -> dict[str, Any]:
        told = honest(state, name)
        change(told)
        return told

    with mock.patch.object(routes, "_model", model):
        yield


_listed = [0]


def changes_each_time(told: dict[str, Any]) -> None:
    """It was created at another time whenever one asks."""
    _listed[0] += 1
    told["created"] += _listed[0]


def longer_than_it_is(told: dict[str, Any]) -> None:
    """The context window is told longer than it is."""
    told["max_model_len"] += 16


@contextmanager
def special_token_counted() -> Iterator[None]:
    """/tokenize puts a token in front."""
    from core.serve import prompts, routes

    honest = prompts.encode_text

    async def encode(engine: Any, text: str, add_special_tokens: bool) -> list[int]:
        return [0, *await honest(engine, text, add_special_tokens)]

    with mock.patch.object(routes, "encode_text", encode):
        yield


@contextmanager
def label_lost() -> Iterator[None]:
    """A caller's X-Request-Id does not come back."""
    from core.serve.guard import RequestIdLabel

    async def call(self: RequestIdLabel, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    with mock.patch.object(RequestIdLabel, "__call__", call):
        yield


@contextmanager
def status_first() -> Iterator[None]:
    """A stream says 200 before it knows whether it can begin."""
    from core.serve import stream
    from core.serve.stream import EventStream

    honest = EventStream._send_all

    async def send_all(self: EventStream, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def rest(message: Any) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        try:
            await honest(self, rest)
        except Exception as error:
            told = stream._error_event(error)
            await send({"type": "http.response.body", "body": told, "more_body": False})

    with mock.patch.object(EventStream, "_send_all", send_all):
        yield
