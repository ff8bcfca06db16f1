"""Bugs of ends and counts: stop strings and ids, choices, usage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec

from core.engine import input_processor
from core.engine.choice import Choice
from core.outputs import EngineOutput, FinishReason
from core.request import Request
from core.sched import finish, report
from core.sched.prompts import Prompts
from core.sched.report import StepReport
from core.text import stop_strings
from core.text.stop_strings import StopChecker
from core_conformance.mutants.variant import Mutant, engine_bug

__all__ = ["MUTANTS"]


@contextmanager
def _stop_string_kept() -> Iterator[None]:
    """Text ends behind the stop string, whatever was asked for, and the other way round."""

    def cut(self: StopChecker, buffer: str, match: str) -> str:
        self.matched, self._held = match, ""
        return buffer[: len(buffer) - len(match)] if self.include_stop_str_in_output else buffer

    with mock.patch.object(StopChecker, "_cut", cut):
        yield


@contextmanager
def _only_within_a_token() -> Iterator[None]:
    """A stop string is looked for in the text of each token alone."""
    honest = StopChecker.push

    def push(self: StopChecker, text: str, *, armed: bool = True) -> str:
        for matcher in self._matchers:
            matcher.state = 0
        return honest(self, text, armed=armed)

    with mock.patch.object(StopChecker, "push", push):
        yield


@contextmanager
def _first_string_of_the_list() -> Iterator[None]:
    """Only the first stop string is looked for."""
    honest = StopChecker.__init__

    def init(self: StopChecker, stop: Any, **kwargs: Any) -> None:
        honest(self, stop[:1], **kwargs)

    with mock.patch.object(StopChecker, "__init__", init):
        yield


@contextmanager
def _held_text_lost() -> Iterator[None]:
    """What is held back for a stop string that does not come is never let out."""
    with mock.patch.object(StopChecker, "finish", return_value=""):
        yield


@contextmanager
def _tokens_behind_the_string_told() -> Iterator[None]:
    """Tokens that came with the one that completed a stop string are told with it."""
    honest = Choice.take

    def take(self: Choice, output: EngineOutput) -> bool:
        before = len(self._token_ids)
        ended = honest(self, output)
        if ended:
            self._token_ids[before:] = [*output.new_token_ids, output.new_token_ids[-1]]
        return ended

    with mock.patch.object(Choice, "take", take):
        yield


@contextmanager
def _ends(check: Callable[[Request, FinishReason | None], FinishReason | None]) -> Iterator[None]:
    honest = finish.check_finish
    with mock.patch.object(report, "check_finish", lambda request: check(request, honest(request))):
        yield


def _ignored_end_ends(request: Request, reason: FinishReason | None) -> FinishReason | None:
    """ignore_eos is ignored."""
    return FinishReason.STOP if request.all_token_ids[-1] in request.sampling_params.eos_token_ids else reason


def _stop_ids_ignored_too(request: Request, reason: FinishReason | None) -> FinishReason | None:
    """ignore_eos ignores stop_token_ids as well."""
    if reason is FinishReason.STOP and request.sampling_params.ignore_eos:
        request.stop_reason = None
        return FinishReason.LENGTH if request.num_output_tokens >= request.max_tokens else None
    return reason


def _stop_id_not_told(request: Request, reason: FinishReason | None) -> FinishReason | None:
    request.stop_reason = None
    return reason


def _every_end_is_a_stop(request: Request, reason: FinishReason | None) -> FinishReason | None:
    return FinishReason.STOP if reason is FinishReason.LENGTH else reason


@contextmanager
def _choices_share_a_seed() -> Iterator[None]:
    def choice_params(params: Any, index: int) -> Any:
        return msgspec.structs.replace(params, n=1)

    with mock.patch.object(input_processor, "_choice_params", choice_params):
        yield


@contextmanager
def _cached_told_each_time() -> Iterator[None]:
    """Every output of a request carries the number of its cached tokens."""
    honest = StepReport._news

    def news(self: StepReport, request: Request, *args: Any) -> EngineOutput:
        told = honest(self, request, *args)
        told.num_cached_tokens = request.num_cached_tokens
        return told

    with mock.patch.object(StepReport, "_news", news):
        yield


@contextmanager
def _cached_is(cached: Callable[[Request], int]) -> Iterator[None]:
    """What is counted when a request starts is something else than what was found."""
    honest = Prompts._note_first_start

    def note(self: Prompts, request: Request) -> None:
        first = request.scheduled_time is None
        honest(self, request)
        if first:
            request.num_cached_tokens = cached(request)

    with mock.patch.object(Prompts, "_note_first_start", note):
        yield


@contextmanager
def _restarts_counted() -> Iterator[None]:
    """A preempted request counts its prompt in the cache's statistics once more."""
    honest = Prompts._note_first_start

    def note(self: Prompts, request: Request) -> None:
        if request.scheduled_time is not None:
            self._stats.prefix_cache_queries += request.num_prompt_tokens
        honest(self, request)

    with mock.patch.object(Prompts, "_note_first_start", note):
        yield


assert stop_strings.StopChecker is StopChecker

MUTANTS: tuple[Mutant, ...] = (
    engine_bug("stop string kept", "stop-strings", _stop_string_kept),
    engine_bug("stop string within a token", "stop-strings", _only_within_a_token),
    engine_bug("first of several stop strings", "stop-strings", _first_string_of_the_list),
    engine_bug("held text never let out", "stop-strings", _held_text_lost),
    engine_bug("tokens behind the stop string told", "stop-strings", _tokens_behind_the_string_told),
    engine_bug("ignored end of sequence ends", "stop-ids", lambda: _ends(_ignored_end_ends)),
    engine_bug("stop ids ignored with ends", "stop-ids", lambda: _ends(_stop_ids_ignored_too)),
    engine_bug("stop id not told", "stop-ids", lambda: _ends(_stop_id_not_told)),
    engine_bug("full length told as a stop", "usage", lambda: _ends(_every_end_is_a_stop), "stop-ids"),
    engine_bug("choices share a seed", "choices", _choices_share_a_seed),
    engine_bug("cached tokens told each time", "usage", _cached_told_each_time),
    engine_bug("one cached token too many", "usage", lambda: _cached_is(lambda r: r.num_computed_tokens + 1)),
    engine_bug("restarts counted as prompts", "usage/recompute", _restarts_counted, "usage"),
)
