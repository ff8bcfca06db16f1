"""A step that goes on from the one before is what preparing it from the start would make of it."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from engine_rig import MakeRig, OpenedDevice, Rig

from core.backend import Graph, OpenConfig
from core.exec.decode_run import DecodeRun
from core.exec.device_copies import DeviceCopies
from core.exec.input_batch import InputBatch, StepInputs
from core.exec.sampler import SampledRows
from core.exec.step_arrays import StepBuffers
from core.exec.step_graphs import RecordedStep
from core.kv.groups import KVCacheGroup
from core.sampling_params import SamplingParams
from core.sched.output import NewRequest, ScheduledRequest, SchedulerOutput
from core.spec import CacheKind, DType, KVCacheSpec


def _cpu() -> OpenedDevice:
    """The device whose storage the host writes in place."""
    pytest.importorskip("core_cpu")
    plugin = importlib.import_module("core_cpu.plugin")
    [info] = plugin.core_backends()
    module, _, attribute = info.load.partition(":")
    backend = getattr(importlib.import_module(module), attribute)()
    backend.open(0, OpenConfig())
    return backend, info, backend.probe()[0]


def _facts(inputs: StepInputs) -> dict[str, Any]:
    """All that a step says, as plain values; the table without the columns that storage of a fixed width has more."""
    batch, width = inputs.batch, -(-max(inputs.batch.groups[0].seq_lens_host) // 16) + 1
    facts: dict[str, Any] = {
        "token_ids": batch.token_ids.tolist(),
        "positions": batch.positions.tolist(),
        "query_start_loc": batch.query_start_loc.tolist(),
        "num_valid_tokens": batch.num_valid_tokens.tolist(),
        "sizes": (batch.num_reqs, batch.num_tokens, batch.num_decodes, batch.max_query_len),
        "states": [id(state) for state in inputs.states],
        "sampling": [id(state) for state in inputs.sampling],
        "draft_token_ids": [list(drafts) for drafts in inputs.draft_token_ids],
        "sample_indices": inputs.sample_indices,
        "sample_positions": inputs.sample_positions,
        "mirror_rows": inputs.mirror_rows.tolist(),
        "logits_rows": inputs.logits_rows,
    }
    for index, group in enumerate(batch.groups):
        assert not group.block_table[:, width:].any()
        facts[f"group {index}"] = (
            group.block_table[:, :width].tolist(),
            group.slots.tolist(),
            group.seq_lens.tolist(),
            list(group.seq_lens_host),
        )
    return facts


def _check(found: StepInputs, expected: StepInputs) -> None:
    assert _facts(found) == _facts(expected)
    assert found.scheduled is expected.scheduled and found.positions is not None
    assert found.positions.tolist() == expected.sample_positions
    assert [row.position for row in found.sampling_rows] == expected.sample_positions
    assert [row.state for row in found.sampling_rows] == expected.states


class Watch:
    """Compares every step that a run goes on to with the same step prepared from the start, in other storage."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.differences: list[AssertionError] = []
        self._others: dict[int, StepBuffers] = {}

    def other(self, buffers: StepBuffers, run: DecodeRun) -> StepBuffers:
        if id(buffers) not in self._others:
            self._others[id(buffers)] = StepBuffers(
                run._mirror._copies, 16, 1, table_width=buffers.table_width, num_groups=len(run._mirror.windows)
            )
        return self._others[id(buffers)]

    def advance(self, honest: Callable[[DecodeRun, SchedulerOutput], bool]) -> Callable[..., bool]:
        def advance(run: DecodeRun, output: SchedulerOutput) -> bool:
            if not honest(run, output):
                self.seen["ended"] += 1
                return False
            other = self.other(run.recorded.buffers, run)
            batch = other.batch(run.recorded.batch.num_reqs)

            def put(arrays: Any) -> Any:
                other.fill(arrays, batch)
                return batch

            try:
                _check(run.inputs, run._mirror.prepare(output.scheduled, put, spread=True))
            except AssertionError as difference:  # the engine would take it for a step that failed
                self.differences.append(difference)
            self._count(run, output)
            return True

        return advance

    def _count(self, run: DecodeRun, output: SchedulerOutput) -> None:
        self.seen["advanced"] += 1
        self.seen["opened"] += any(any(entry.new_block_ids) for entry in output.scheduled)
        self.seen["padded"] += run.recorded.batch.num_reqs > len(output.scheduled)
        self.seen["hidden"] += any(
            bool(window) and entry.num_computed_tokens >= window + run._mirror.block_size - 1
            for window in run._mirror.windows
            for entry in output.scheduled
        )


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch()
    with mock.patch.object(DecodeRun, "advance", watch.advance(DecodeRun.advance)):
        yield watch
    for difference in watch.differences:
        raise difference


def _traffic(rig: Rig, seed: int) -> dict[str, list[int]]:
    """Requests of many kinds that come and go at random; the tokens of those that were not aborted."""
    rng, tokens, aborted = random.Random(seed), dict[str, list[int]](), set[str]()
    kinds: list[dict[str, Any]] = [
        {},
        {},
        {"temperature": 0.8, "seed": 3, "top_k": 20},
        {"min_tokens": 5, "stop_token_ids": tuple(range(0, 256, 9))},
        {"logprobs": 1, "logit_bias": {5: 4.0}},
        {"stop_token_ids": tuple(range(0, 256, 17))},
    ]
    for _ in range(260):
        if rng.random() < 0.12 and len(tokens) < 24:
            prompt = [rng.randrange(256) for _ in range(rng.choice([1, 2, 15, 16, 17, 40]))]
            params = dict(rng.choice(kinds))
            if rng.random() < 0.05:
                params = {"repetition_penalty": 1.2}  # which looks at its tokens, so that runs wait until it is gone
            tokens[rig.start(prompt, max_tokens=rng.randrange(5, 70), ignore_eos=True, **params)] = []
        if rng.random() < 0.01 and tokens:
            aborted.add(name := rng.choice(list(tokens)))
            rig.engine.abort([name])
        for output in rig.engine.step():
            tokens[output.request_id] += output.new_token_ids
        rig.engine.check_integrity()
    for name, outputs in rig.finish().items():
        tokens[name] += [token for output in outputs for token in output.new_token_ids]
    return {name: said for name, said in tokens.items() if name not in aborted}


SCHEDULES: dict[str, dict[str, Any]] = {
    "async": {},
    "sync": {"async_scheduling": False},
    "chunks": {"max_num_batched_tokens": 8},
    "preempted": {"cache": {"num_blocks": 14}},
    "swapped": {"cache": {"num_blocks": 14, "swap_space_bytes": 1 << 20}, "preemption_mode": "swap"},
}


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_that_goes_on_equals_one_prepared_from_the_start(
    watch: Watch, model: str, schedule: str, make_rig: MakeRig, request: pytest.FixtureRequest
) -> None:
    folder, settings = request.getfixturevalue(model), dict(SCHEDULES[schedule])
    settings["cache"] = {"block_size": 16, **settings.get("cache", {})}
    told = _traffic(make_rig(folder, device=_cpu(), **settings), seed=len(schedule))
    assert watch.seen["advanced"] > 60 and watch.seen["ended"] > 5 and watch.seen["opened"] > 5
    assert watch.seen["padded"] > 0 and (watch.seen["hidden"] > 10 or model == "llama")
    eager = _traffic(make_rig(folder, device=_cpu(), enforce_eager=True, **settings), seed=len(schedule))
    assert {name: eager[name] for name in told if name in eager} == {n: told[n] for n in told if n in eager}


def _entry(name: str, computed: int, num_tokens: int = 1, **more: Any) -> ScheduledRequest:
    more.setdefault("samples", True)
    return ScheduledRequest(request_id=name, num_computed_tokens=computed, num_scheduled_tokens=num_tokens, **more)


def _new(name: str) -> NewRequest:
    params = SamplingParams(temperature=0.0)
    return NewRequest(
        request_id=name, token_ids=[4], num_prompt_tokens=1, sampling_params=params, block_ids=([int(name[1:])],)
    )


def _step(*entries: ScheduledRequest, new: Sequence[NewRequest] = ()) -> SchedulerOutput:
    total = sum(entry.num_scheduled_tokens for entry in entries)
    return SchedulerOutput(step_id=0, scheduled=list(entries), num_scheduled_tokens=total, new_requests=list(new))


@pytest.mark.parametrize(
    "output",
    [
        _step(_entry("r1", 1)),
        _step(_entry("r2", 1), _entry("r1", 1)),
        _step(_entry("r1", 1), _entry("r3", 1)),
        _step(_entry("r1", 1), _entry("r2", 2)),
        _step(_entry("r1", 1), _entry("r2", 0)),
        _step(_entry("r1", 1), _entry("r2", 1, samples=False)),
        _step(_entry("r1", 1), _entry("r2", 1, 2, draft_token_ids=(8,))),
        _step(_entry("r1", 1), _entry("r2", 1), _entry("r3", 1)),
        _step(_entry("r1", 1), _entry("r2", 1), new=[_new("r2")]),
    ],
    ids=["one left", "other order", "another", "ahead", "behind", "no sample", "a draft", "one more", "came back"],
)
def test_another_step_is_refused_and_changes_nothing(output: SchedulerOutput) -> None:
    copies = DeviceCopies(_cpu()[0])
    spec = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=1, head_dim=8, v_head_dim=8, dtype=DType.FLOAT32)
    mirror = InputBatch(4, [KVCacheGroup(spec=spec, layers=(0,))], 16, copies)
    for name in ("r1", "r2", "r3"):
        mirror.add(_new(name))
    buffers = StepBuffers(copies, 4, 1, table_width=4, num_groups=1)
    recorded = RecordedStep(batch=buffers.batch(2), buffers=buffers, graph=Graph(lambda: None))
    first = _step(_entry("r1", 0), _entry("r2", 0))
    assert DecodeRun.may_begin(first, recorded)
    run = DecodeRun(mirror.prepare(first.scheduled, recorded.put, spread=True), recorded, mirror)
    mirror.keep_sampled(run.inputs.mirror_rows, SampledRows(token_ids=torch.tensor([7, 9], dtype=torch.int32)))
    before = _facts(run.inputs)
    assert not run.advance(output)
    assert _facts(run.inputs) == before
    assert run.advance(_step(_entry("r1", 1), _entry("r2", 1)))
    assert run.inputs.batch.token_ids.tolist() == [7, 9]
