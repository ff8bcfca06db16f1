"""Bugs of speculation: what is accepted, what of a refused draft stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy.typing as npt

from core.exec import drafts, step_result
from core.exec.input_batch import InputBatch
from core.exec.model_runner import ModelRunner
from core.exec.sampler import needs_known_tokens
from core.outputs import EngineOutput, FinishReason
from core.request import Request, RequestStatus
from core.sched import report
from core.sched.report import StepReport
from core_conformance.mutants.variant import Mutant, engine_bug

__all__ = ["MUTANTS"]


@contextmanager
def _accepts(more: int, least: int = 0) -> Iterator[None]:
    """Another number of drafts stays than are right."""
    honest = drafts.count_accepted

    def count(draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> int:
        return max(least, min(honest(draft_token_ids, sampled_token_ids) + more, len(draft_token_ids)))

    with mock.patch.object(step_result, "count_accepted", count):
        yield


@contextmanager
def _refused_draft_told() -> Iterator[None]:
    """Behind the right drafts the next draft is told, and not what was drawn in its place."""
    honest = step_result.collect

    def collect(step: Any) -> Any:
        output = honest(step)
        for state, proposed in zip(step.states, step.draft_token_ids, strict=True):
            tokens = output.sampled_token_ids.get(state.request_id)
            if tokens and len(tokens) <= len(proposed):
                tokens[-1] = int(proposed[len(tokens) - 1])
        return output

    with mock.patch("core.exec.model_runner.collect", collect):
        yield


@contextmanager
def _last_token_cached() -> Iterator[None]:
    """A block counts as computed with its last token known, which no step has written yet."""
    honest = StepReport._advance

    def advance(self: StepReport, request: Request, scheduled: Any, num_sampled: int) -> bool:
        done = honest(self, request, scheduled, num_sampled)
        if scheduled.draft_token_ids:
            self._kv.cache_blocks(request, request.num_tokens)
        return done

    with mock.patch.object(StepReport, "_advance", advance):
        yield


@contextmanager
def _told_behind_the_end() -> Iterator[None]:
    """Of tokens that come together all are told, also those behind one that ends the request."""

    def append(request: Request, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
        reason = None
        for token_id in token_ids:
            request.all_token_ids.append(token_id)
            reason = reason or report.check_finish(request)  # type: ignore[attr-defined]
        return len(token_ids), reason

    with mock.patch.object(report, "_append", append):
        yield


@contextmanager
def _news_of_the_aborted() -> Iterator[None]:
    """What a step in flight gives for an aborted request is told all the same."""
    honest = StepReport.take

    def take(self: StepReport, share: Any, result: Any) -> EngineOutput | None:
        told = honest(self, share, result)
        tokens = result.sampled_token_ids.get(share[0].request_id, ())
        if told is None and share[0].status is RequestStatus.FINISHED and tokens:
            return EngineOutput(request_id=share[0].request_id, new_token_ids=tuple(tokens))
        return told

    with mock.patch.object(StepReport, "take", take):
        yield


@contextmanager
def _every_draft_seen(looks_back: Callable[[ModelRunner, Any], bool]) -> Iterator[None]:
    """Rows of a step see all of its drafts, those behind them included, where `looks_back` says so."""
    honest, prepare = ModelRunner._sampling_row, InputBatch.prepare
    ends: dict[str, int] = {}

    def prepared(self: InputBatch, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        ends.clear()
        ends.update({e.request_id: e.num_computed_tokens + e.num_scheduled_tokens for e in scheduled})
        return prepare(self, scheduled, *args, **kwargs)

    def tokens_before(self: InputBatch, state: Any, position: int) -> npt.NDArray[Any]:
        tokens: npt.NDArray[Any] = self._tokens[state.row, : max(position, ends.get(state.request_id, 0))]
        return tokens

    def sampling_row(self: ModelRunner, state: Any, position: int) -> Any:
        if not looks_back(self, state):
            return honest(self, state, position)
        with mock.patch.object(InputBatch, "tokens_before", tokens_before):
            return honest(self, state, position)

    with (
        mock.patch.object(ModelRunner, "_sampling_row", sampling_row),
        mock.patch.object(InputBatch, "prepare", prepared),
    ):
        yield


def _constrained(runner: ModelRunner, state: Any) -> bool:
    return runner._token_masks is not None and runner._token_masks.constrains(state.request_id)


def _penalised(runner: ModelRunner, state: Any) -> bool:
    return needs_known_tokens(state.params)


@contextmanager
def _mask_a_token_late() -> Iterator[None]:
    """A mask is asked for before the newest token is known."""

    def tokens_before(self: InputBatch, state: Any, position: int) -> npt.NDArray[Any]:
        tokens: npt.NDArray[Any] = self._tokens[state.row, : max(position - 1, state.num_prompt_tokens)]
        return tokens

    honest = ModelRunner._sampling_row

    def sampling_row(self: ModelRunner, state: Any, position: int) -> Any:
        if not _constrained(self, state):
            return honest(self, state, position)
        with mock.patch.object(InputBatch, "tokens_before", tokens_before):
            return honest(self, state, position)

    with mock.patch.object(ModelRunner, "_sampling_row", sampling_row):
        yield


MUTANTS: tuple[Mutant, ...] = (
    engine_bug("one draft accepted past the mismatch", "drafts/wrong", lambda: _accepts(1), "drafts"),
    engine_bug("no draft ever accepted", "drafts/perfect", lambda: _accepts(-99), "drafts/perfect"),
    engine_bug("refused draft told", "drafts/wrong", _refused_draft_told, "drafts/random"),
    engine_bug("penalties see refused drafts", "constraints/penalties-drafts", lambda: _every_draft_seen(_penalised)),
    engine_bug("token cached before it is computed", "drafts/prefix-cache", _last_token_cached),
    engine_bug("told behind the end", "drafts/ends", _told_behind_the_end),
    engine_bug("news of an aborted request", "chance", _news_of_the_aborted, "drafts/abort"),
    engine_bug("grammar advanced on a refused draft", "structured/drafts", lambda: _every_draft_seen(_constrained)),
    engine_bug("mask one token late", "structured", _mask_a_token_late),
)
