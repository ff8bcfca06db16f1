"""Bugs of the sampler: penalties, biases, masks, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor

from core.exec import sampler
from core.exec.model_runner import ModelRunner
from core.exec.sampler import SampledRows, Sampler, SamplingRow
from core.kv.kv_cache_manager import KVCacheManager, PrefixHit
from core.request import Request
from core_conformance.mutants.variant import Mutant, engine_bug

__all__ = ["MUTANTS"]


@contextmanager
def _penalties(change: Callable[[SamplingRow], SamplingRow | None]) -> Iterator[None]:
    """Penalties see another row than the one that is sampled; None leaves them out."""
    honest = sampler._penalize

    def penalize(logits: Tensor, row: SamplingRow) -> None:
        params = row.state.params
        if row.token_ids is None or (params.repetition_penalty == 1.0 and not params.frequency_penalty):
            honest(logits, row)
            return
        changed = change(row)
        if changed is not None:
            honest(logits, changed)

    with mock.patch.object(sampler, "_penalize", penalize):
        yield


class _State:
    """A state with some attributes of its own."""

    def __init__(self, state: Any, **own: Any) -> None:
        self.__dict__.update({name: getattr(state, name) for name in state.__slots__} | own)


def _row(row: SamplingRow, token_ids: Any = None, **own: Any) -> SamplingRow:
    ids = row.token_ids if token_ids is None else token_ids
    state: Any = _State(row.state, **own)
    return SamplingRow(state=state, position=row.position, token_ids=ids)


def _prompt_counted(row: SamplingRow) -> SamplingRow:
    """Frequency and presence count the prompt as output."""
    return _row(row, num_prompt_tokens=0)


def _output_alone(row: SamplingRow) -> SamplingRow:
    """Repetition looks at the output alone."""
    assert row.token_ids is not None
    return _row(row, token_ids=row.token_ids[row.state.num_prompt_tokens :], num_prompt_tokens=0)


def _newest_token_unseen(row: SamplingRow) -> SamplingRow:
    assert row.token_ids is not None
    return _row(row, token_ids=row.token_ids[:-1])


def _presence_for_each(row: SamplingRow) -> SamplingRow:
    """Presence is taken off once for each time that a token came."""
    params = row.state.params
    joined = params.frequency_penalty + params.presence_penalty
    changed = msgspec.structs.replace(params, frequency_penalty=joined, presence_penalty=0.0)
    return _row(row, params=changed)


@contextmanager
def _parameters(**changes: Callable[[Any], Any]) -> Iterator[None]:
    """The sampler sees other parameters: field to function of the row's."""
    honest = Sampler._constrain

    def constrain(self: Sampler, logits: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Any:
        other = []
        for row in rows:
            values = {name: change(row.state.params) for name, change in changes.items()}
            changed = _row(row, params=msgspec.structs.replace(row.state.params, **values))
            changed.bitmask = row.bitmask
            other.append(changed)
        return honest(self, logits, other, indices)

    with mock.patch.object(Sampler, "_constrain", constrain):
        yield


@contextmanager
def _bias_of_the_first_row() -> Iterator[None]:
    """A bias is added to row 0, whoever asked for it."""
    honest = Sampler._constrain

    def constrain(self: Sampler, logits: Tensor, rows: Sequence[SamplingRow], indices: Sequence[int]) -> Any:
        failed = honest(self, logits, rows, indices)
        for index, row in enumerate(rows):
            if row.state.params.logit_bias and index:
                ids = list(row.state.params.logit_bias)
                values = torch.tensor(list(row.state.params.logit_bias.values()))
                logits[index, ids] -= values
                logits[0, ids] += values
        return failed

    with mock.patch.object(Sampler, "_constrain", constrain):
        yield


@contextmanager
def _mask_of_the_row_before() -> Iterator[None]:
    """Bitmasks are dealt out one row late."""
    honest = Sampler._apply_bitmasks

    def apply(self: Sampler, logits: Tensor, rows: Sequence[SamplingRow]) -> None:
        if len(rows) < 2:
            honest(self, logits, rows)
            return
        masks = [row.bitmask for row in rows]
        for row, mask in zip(rows, [*masks[1:], masks[0]], strict=True):
            row.bitmask = mask
        honest(self, logits, rows)

    with mock.patch.object(Sampler, "_apply_bitmasks", apply):
        yield


@contextmanager
def _logprobs_of_what_is_drawn_from() -> Iterator[None]:
    """Log-probabilities are taken behind biases, penalties and temperature."""
    honest = Sampler.sample

    def sample(self: Sampler, logits: Tensor, rows: Sequence[SamplingRow]) -> SampledRows:
        out = honest(self, logits, rows)
        wanted = out.logprob_rows
        if out.logprobs is not None:
            heat = torch.tensor([rows[i].state.params.temperature or 1.0 for i in wanted])[:, None]
            raw = torch.log_softmax(logits[wanted] / heat, dim=-1)
            most = out.logprobs[0].shape[1] - 1
            out.logprobs = sampler.top_logprobs(raw, out.token_ids[wanted].long(), most)
        return out

    with mock.patch.object(Sampler, "sample", sample):
        yield


@contextmanager
def _top_logprobs(change: Callable[[tuple[Tensor, Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]]) -> Iterator[None]:
    honest = sampler.top_logprobs
    with mock.patch.object(sampler, "top_logprobs", lambda *args: change(honest(*args))):
        yield


def _ranks_from_zero(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return parts[0], parts[1], parts[2] - 1


def _own_token_last(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return parts[0].roll(-1, dims=1), parts[1].roll(-1, dims=1), parts[2]


def _logits_as_they_are(parts: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Values without their normalisation: the best is 0."""
    return parts[0] - parts[0].amax(1, keepdim=True), parts[1], parts[2]


@contextmanager
def _prompt_logprobs(change: Callable[[int, list[Any]], tuple[int, list[Any]]]) -> Iterator[None]:
    honest = ModelRunner._prompt_logprobs

    def prompt_logprobs(self: ModelRunner, hidden: Tensor, inputs: Any) -> Any:
        found = honest(self, hidden, inputs)
        return {request_id: change(*part) for request_id, part in found.items()}

    with mock.patch.object(ModelRunner, "_prompt_logprobs", prompt_logprobs):
        yield


def _last_of_a_chunk_lost(first: int, entries: list[Any]) -> tuple[int, list[Any]]:
    """The entry of the token behind a chunk, which its last logits give, is left out."""
    return first, entries[:-1]


def _each_for_the_token_before(first: int, entries: list[Any]) -> tuple[int, list[Any]]:
    return first, [*entries[1:], entries[0]]


@contextmanager
def _prompt_logprobs_behind_a_hit() -> Iterator[None]:
    """A prompt whose log-probabilities are wanted may find a prefix, which has none."""
    honest = KVCacheManager.get_computed_blocks

    def get_computed_blocks(self: KVCacheManager, request: Request) -> PrefixHit:
        params = request.sampling_params
        request.sampling_params = msgspec.structs.replace(params, prompt_logprobs=None)
        try:
            return honest(self, request)
        finally:
            request.sampling_params = params

    with mock.patch.object(KVCacheManager, "get_computed_blocks", get_computed_blocks):
        yield


def _bent(name: str, kind: str, bug: Any) -> Mutant:
    return engine_bug(name, f"constraints/{kind}", bug)


MUTANTS: tuple[Mutant, ...] = (
    _bent("prompt counted as output", "penalties", lambda: _penalties(_prompt_counted)),
    _bent("repetition of the output alone", "rewards", lambda: _penalties(_output_alone)),
    _bent("newest token not penalised", "rewards", lambda: _penalties(_newest_token_unseen)),
    _bent("presence counted each time", "rewards", lambda: _penalties(_presence_for_each)),
    _bent("bias added to the first row", "logit-bias", _bias_of_the_first_row),
    _bent("list of allowed ids ignored", "allowed-ids", lambda: _parameters(allowed_token_ids=lambda params: None)),
    _bent(
        "bad words of one token alone",
        "bad-words",
        lambda: _parameters(
            bad_words_token_ids=lambda p: tuple(word for word in p.bad_words_token_ids if len(word) < 2)
        ),
    ),
    _bent(
        "one token too few before an end",
        "min-tokens",
        lambda: _parameters(min_tokens=lambda p: max(p.min_tokens - 1, 0)),
    ),
    engine_bug("mask of another row", "structured", _mask_of_the_row_before),
    engine_bug("logprobs behind bias and temperature", "logprobs", _logprobs_of_what_is_drawn_from),
    engine_bug("ranks from 0", "logprobs", lambda: _top_logprobs(_ranks_from_zero), "prompt-logprobs"),
    engine_bug("own token last", "logprobs", lambda: _top_logprobs(_own_token_last), "prompt-logprobs"),
    engine_bug("logprobs not normalised", "logprobs", lambda: _top_logprobs(_logits_as_they_are), "prompt-logprobs"),
    engine_bug("logprob behind a chunk lost", "prompt-logprobs", lambda: _prompt_logprobs(_last_of_a_chunk_lost)),
    engine_bug("logprobs of the token before", "prompt-logprobs", lambda: _prompt_logprobs(_each_for_the_token_before)),
    engine_bug("prompt logprobs behind a hit", "prompt-logprobs", _prompt_logprobs_behind_a_hit),
)
