"""Bugs of the model runner: batches, block tables, tokens in flight, random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from core.exec import request_state
from core.exec.input_batch import InputBatch, StepInputs
from core.exec.model_runner import ModelRunner
from core.exec.request_state import RequestState
from core.sched.output import NewRequest
from core.sched.step import StepBuilder
from core_conformance.mutants.variant import Mutant, engine_bug

__all__ = ["MUTANTS"]


@contextmanager
def _swap(*, out: bool, into: bool) -> Iterator[None]:
    """One of the two copies of swapping is never made."""
    honest = ModelRunner._swap

    def swap(self: ModelRunner, output: Any) -> None:
        pairs = {"swap_out": output.swap_out if out else [], "swap_in": output.swap_in if into else []}
        honest(self, dataclasses.replace(output, **pairs))

    with mock.patch.object(ModelRunner, "_swap", swap):
        yield


@contextmanager
def _window_hides_one_block_more() -> Iterator[None]:
    honest = InputBatch._hide_unread

    def hide(self: InputBatch, table: Any, index: int, seq_lens: Any, computed: Any) -> None:
        honest(self, table, index, seq_lens, computed + self.block_size)

    with mock.patch.object(InputBatch, "_hide_unread", hide):
        yield


@contextmanager
def _table_of_the_row_before() -> Iterator[None]:
    """A row that is used again keeps the block table of the request before."""
    honest = InputBatch.add

    def add(self: InputBatch, request: NewRequest) -> None:
        row = self._free_rows[-1] if self._free_rows else 0
        before = self._tables[0][row, :1].copy()
        honest(self, request)
        if before.any():
            self._tables[0][row, :1] = before

    with mock.patch.object(InputBatch, "add", add):
        yield


@contextmanager
def _pending_token_of_another_row() -> Iterator[None]:
    """The token that is still on the device is read from the row of the neighbour."""
    honest = ModelRunner._sample

    def sample(self: ModelRunner, hidden: Any, inputs: StepInputs) -> Any:
        sampled = honest(self, hidden, inputs)
        if len(inputs.states) > 1:
            self._inputs._write_newest()
            self._inputs._last_sampled.copy_(self._inputs._last_sampled.roll(1))
        return sampled

    with mock.patch.object(ModelRunner, "_sample", sample):
        yield


@contextmanager
def _samples_at_the_end_of_each_chunk() -> Iterator[None]:
    """The last token of a chunk is sampled from, whether the prompt goes on or not."""
    honest = InputBatch.prepare

    def prepare(self: InputBatch, scheduled: Any, *args: Any, **kwargs: Any) -> StepInputs:
        for entry in scheduled:
            state = self[entry.request_id]
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            if not entry.samples and end < state.num_tokens:
                self._tokens[state.row, end] = self._tokens[state.row, end - 1]
        return honest(self, scheduled, *args, **kwargs)

    with mock.patch.object(InputBatch, "prepare", prepare):
        yield


@contextmanager
def _seed_with(more: Callable[[RequestState, NewRequest], int]) -> Iterator[None]:
    """What a request draws depends on something besides its seed."""
    honest = RequestState.__init__

    def init(self: RequestState, request: NewRequest, row: int) -> None:
        honest(self, request, row)
        self.seed ^= more(self, request)

    with mock.patch.object(RequestState, "__init__", init):
        yield


@contextmanager
def _one_seed_for_all() -> Iterator[None]:
    """Every request has the seed 0."""
    with mock.patch.object(request_state, "_seed", return_value=0):
        yield


@contextmanager
def _draws_by_the_step() -> Iterator[None]:
    """The position of a draw is counted in the step, and not in the sequence."""
    honest = InputBatch.prepare

    def prepare(self: InputBatch, scheduled: Any, *args: Any, **kwargs: Any) -> StepInputs:
        inputs = honest(self, scheduled, *args, **kwargs)
        computed = [entry.num_computed_tokens for entry in scheduled]
        pairs = zip(inputs.sample_positions, inputs.sample_indices, strict=True)
        inputs.sample_positions = [position - computed[index] for position, index in pairs]
        return inputs

    with mock.patch.object(InputBatch, "prepare", prepare):
        yield


@contextmanager
def _chunk_repeats_its_last_token() -> Iterator[None]:
    """A chunk that ends inside a block is computed up to the block's end before, and counted in full."""
    honest = StepBuilder.add

    def add(self: StepBuilder, request: Any, num_tokens: int, *args: Any) -> None:
        honest(self, request, num_tokens, *args)
        share = self._shares[request.request_id][1]
        if num_tokens > 1 and not share.samples:
            share.num_scheduled_tokens -= 1

    with mock.patch.object(StepBuilder, "add", add):
        yield


MUTANTS: tuple[Mutant, ...] = (
    engine_bug("swapped out without a copy", "preemption/swap", lambda: _swap(out=False, into=True)),
    engine_bug("swapped in without a copy", "preemption/swap", lambda: _swap(out=True, into=False)),
    engine_bug("window hides one block more", "greedy/gemma3", _window_hides_one_block_more, "greedy", "chunks/gemma3"),
    engine_bug("first block of the request before", "prefix-cache", _table_of_the_row_before),
    engine_bug("pending token of another row", "greedy", _pending_token_of_another_row, "sync", "batch-invariance"),
    engine_bug("a chunk's end overwrites the prompt", "chunks", _samples_at_the_end_of_each_chunk),
    engine_bug("last token of a chunk left out", "chunks", _chunk_repeats_its_last_token),
    engine_bug("seed mixed with the row", "seeds/batch", lambda: _seed_with(lambda state, request: state.row), "seeds"),
    engine_bug(
        "seed mixed with the tokens so far",
        "seeds/preemption",
        lambda: _seed_with(lambda state, request: len(request.token_ids)),
        "seeds",
    ),
    engine_bug("one seed for all requests", "seeds", _one_seed_for_all, "constraints/seed"),
    engine_bug("draws by the position in the step", "seeds", _draws_by_the_step),
)
