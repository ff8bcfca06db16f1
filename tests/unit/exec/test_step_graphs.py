"""Recorded decode steps: their tokens are those of eager steps, and padding touches nothing."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bare import BareBackend, binder
from engine_rig import MakeRig, OpenedDevice, Rig
from torch import Tensor

from core.backend import Backend, Capture, Graph, OpenConfig, Plan, Verdict
from core.backend.negotiate import Binder
from core.backend.ops import AttentionOp, OpSpec, RmsNormOp
from core.exec.device_copies import DeviceCopies
from core.exec.step_arrays import StepArrays, StepBuffers
from core.exec.step_graphs import graph_rule, padded_size
from core.spec import BackendInfo, DeviceInfo, DType


def _open(name: str) -> OpenedDevice:
    plugin = importlib.import_module(f"core_{name}.plugin")
    [info] = plugin.core_backends()
    module, _, attribute = info.load.partition(":")
    backend = getattr(importlib.import_module(module), attribute)()
    backend.open(0, OpenConfig())
    return backend, info, backend.probe()[0]


@pytest.fixture(params=["sim", "cpu"])
def device(request: pytest.FixtureRequest) -> OpenedDevice:
    pytest.importorskip(f"core_{request.param}")
    return _open(request.param)


def _prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


def _staggered(rig: Rig) -> list[list[int]]:
    """Eleven requests of different lengths, so that the batch shrinks from 11 to 1 on the way."""
    ids = [rig.start(prompt, max_tokens=3 + 2 * index, ignore_eos=True) for index, prompt in enumerate(_prompts(11))]
    news = rig.finish()
    return [[token for output in news[i] for token in output.new_token_ids] for i in ids]


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize(
    "scheduler",
    [{}, {"async_scheduling": False}, {"force_preemption": True}],
    ids=["async", "sync", "preempted"],
)
def test_tokens_are_those_of_eager_steps(
    device: OpenedDevice, model: str, scheduler: dict[str, Any], make_rig: MakeRig, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    recorded = make_rig(folder, device=device, **scheduler)
    eager = make_rig(folder, device=_open(device[1].name), enforce_eager=True, **scheduler)
    assert _staggered(recorded) == _staggered(eager)
    assert recorded.runner.graphs.num_replays > (0 if scheduler.get("force_preemption") else 10)
    assert eager.runner.graphs.num_replays == 0
    assert "graphs of decode steps" in recorded.runner.resolved
    assert "no graphs (--enforce-eager)" in eager.runner.resolved


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_small_chunks_beside_single_tokens_are_replayed_as_rows(
    device: OpenedDevice, model: str, make_rig: MakeRig, request: pytest.FixtureRequest
) -> None:
    """A stream runs while prompts come in chunks of at most 7 tokens, one of them scored."""
    folder, told = request.getfixturevalue(model), []
    for eager in (False, True):
        rig = make_rig(
            folder, device=_open(device[1].name), enforce_eager=eager, max_num_batched_tokens=8, async_scheduling=False
        )
        ids = [rig.start(prompt, max_tokens=40, ignore_eos=True) for prompt in _prompts(1)]
        for _ in range(10):
            rig.engine.step()
        before = rig.runner.graphs.num_replays
        ids += [
            rig.start(prompt, max_tokens=4, ignore_eos=True, prompt_logprobs=0 if index else None)
            for index, prompt in enumerate(_prompts(3, seed=2))
        ]
        news = rig.finish()
        told.append([[token for output in news[i] for token in output.new_token_ids] for i in ids])
        if not eager:
            assert rig.runner.graphs.num_replays - before > 12  # every step that holds the stream
            assert 8 in {size for _, size in rig.runner.graphs.sizes}
    assert told[0] == told[1]


def test_each_size_is_recorded_once_and_serves_smaller_batches(
    device: OpenedDevice, llama: Path, make_rig: MakeRig
) -> None:
    rig = make_rig(llama, device=device)
    _staggered(rig)
    sizes = rig.runner.graphs.sizes
    _staggered(rig)
    assert rig.runner.graphs.sizes == sizes
    assert {size for _, size in sizes} == {1, 2, 4, 8, 16}


def test_padding_rows_are_never_written_to_the_cache(device: OpenedDevice, llama: Path, make_rig: MakeRig) -> None:
    """Three requests run in a step of four; block 0, where the fourth reads, keeps the bytes that it had."""
    rig = make_rig(llama, device=device, cache={"enable_prefix_caching": False})
    slabs = rig.runner._pool.slabs
    null_blocks = [view[0] for slab in slabs for view in slab.views()]
    for plane in null_blocks:
        plane.fill_(3.0)
    rig.run(_prompts(3), max_tokens=8, ignore_eos=True)
    assert rig.runner.graphs.num_replays > 0
    assert all(bool((plane == 3.0).all()) for plane in null_blocks)


def test_weights_replaced_in_place_keep_graphs_valid(device: OpenedDevice, llama: Path, make_rig: MakeRig) -> None:
    rig = make_rig(llama, device=device, cache={"enable_prefix_caching": False})
    prompts = _prompts(2)
    before = rig.run(prompts, max_tokens=8, ignore_eos=True)
    sizes, weight = rig.runner.graphs.sizes, rig.runner._model._layers[0]._mlp._down.weight  # type: ignore[attr-defined]
    kept = {name: part.clone() for name, part in weight.tensors().items()}
    weight.update_({name: torch.zeros_like(part) for name, part in kept.items()})
    changed = rig.run(prompts, max_tokens=8, ignore_eos=True)
    weight.update_(kept)
    assert changed != before
    assert rig.run(prompts, max_tokens=8, ignore_eos=True) == before
    assert rig.runner.graphs.sizes == sizes


def test_requests_that_want_more_than_tokens_are_served_by_graphs(
    device: OpenedDevice, llama: Path, make_rig: MakeRig
) -> None:
    """Logprobs, penalties, seeds and bad words beside greedy rows, in steps that are padded."""

    def answers(rig: Rig) -> list[Any]:
        ids = [
            rig.start([1, 2, 3], max_tokens=6, ignore_eos=True, logprobs=2),
            rig.start([4, 5], max_tokens=9, ignore_eos=True, temperature=0.8, seed=4, top_p=0.9),
            rig.start([6], max_tokens=7, ignore_eos=True, repetition_penalty=1.3, bad_words_token_ids=((7,),)),
        ]
        news = rig.finish()
        return [
            [(o.new_token_ids, [e.token_ids for e in o.new_logprobs or []]) for o in news[request_id]]
            for request_id in ids
        ]

    eager = make_rig(llama, device=_open(device[1].name), enforce_eager=True)
    recorded = make_rig(llama, device=device)
    assert answers(recorded) == answers(eager)
    assert recorded.runner.graphs.num_replays > 0


class _Unrecordable(BareBackend):
    """A chip that says it records steps, and does not."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.composite() if op.name not in ("attention", "sample") else Verdict.native()

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        reference = binder().bind(op)
        return reference

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        raise RuntimeError("out of graph memory")


def test_a_step_that_cannot_be_recorded_is_told_once_and_runs_eagerly(
    llama: Path, make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    backend = _Unrecordable()
    backend.open(0, OpenConfig())
    info = BackendInfo(name="bare", vendor="nobody", api=(1, 0, 0), load="bare:BareBackend")
    rig = make_rig(llama, device=(backend, info, backend.probe()[0]), cache={"block_size": 16})
    with caplog.at_level(logging.WARNING, logger="core.exec"):
        tokens = _staggered(rig)
    [record] = [r for r in caplog.records if "could not be recorded" in r.getMessage()]
    assert "out of graph memory" in record.getMessage() and "--enforce-eager" in record.getMessage()
    assert tokens == _staggered(make_rig(llama))
    assert rig.runner.graphs.sizes == [] and rig.runner.graphs.num_replays == 0


class _Judge(Backend):
    """Answers with one Capture an operation."""

    def __init__(self, **answers: Capture) -> None:
        self.answers = answers

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(index=0, arch="judge", memory_bytes=0, sdk="none")]

    def open(self, index: int, config: OpenConfig) -> None:
        raise NotImplementedError

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        answer = self.answers.get(op.name)
        return Verdict.composite() if answer is None else Verdict.native(capture=answer)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        raise NotImplementedError

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("answers", "expected", "reason"),
    [
        ({"attention": "ANY", "rms_norm": "ANY"}, "ANY", ""),
        ({"attention": "UNIFORM", "rms_norm": "ANY"}, "UNIFORM", ""),
        ({"attention": "SINGLE", "rms_norm": "UNIFORM"}, "SINGLE", ""),
        ({"attention": "ANY", "rms_norm": "NEVER"}, "NEVER", "rms_norm: the backend says NEVER"),
        ({"rms_norm": "ANY"}, "NEVER", "attention: its composite reads lengths on the host"),
        ({"attention": "ANY"}, "ANY", ""),
    ],
)
def test_the_strictest_operation_decides(answers: dict[str, str], expected: str, reason: str) -> None:
    backend = _Judge(**{name: Capture(value) for name, value in answers.items()})
    info = BackendInfo(name="judge", vendor="nobody", api=(1, 0, 0), load="x:y")
    ops = Binder(backend, info, backend.probe()[0], block_size=16)
    attention = AttentionOp(
        dtype=DType.FLOAT32, num_heads=2, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=DType.FLOAT32, scale=1.0
    )
    for op in (attention, RmsNormOp(dtype=DType.FLOAT32, dim=8, eps=1e-6)):
        ops.table.add(ops.resolve(op))
    rule = graph_rule(backend, ops.table)
    assert (rule.capture, rule.reason) == (Capture(expected), reason)
    assert graph_rule(backend, ops.table, enforce_eager=True).capture is Capture.NEVER
    assert graph_rule(backend, ops.table, observed=True).reason == "each operation is observed"


def test_a_backend_without_capture_is_never_asked_to_record(llama: Path, make_rig: MakeRig) -> None:
    rig = make_rig(llama)
    assert "no graphs (the backend records no steps)" in rig.runner.resolved
    rig.run([[1, 2]], max_tokens=4)
    assert rig.runner.graphs.sizes == []


def test_sizes_grow_by_doubling_and_then_by_eight() -> None:
    assert [padded_size(n, 64) for n in (1, 2, 3, 5, 8, 9, 16, 17, 63, 64, 65)] == [
        1, 2, 4, 8, 8, 16, 16, 24, 64, 64, None,
    ]  # fmt: skip
    assert padded_size(9, 12) == 12, "the largest size is that of the storage"


def _arrays(lens: list[int], query_len: int, width: int) -> StepArrays:
    count = len(lens)
    numbers = np.arange(count * query_len, dtype=np.int32)
    positions = np.concatenate([np.arange(n - query_len, n, dtype=np.int32) for n in lens])
    return StepArrays(
        token_ids=numbers + 100,
        positions=positions,
        counts=np.full(count, query_len, dtype=np.int32),
        starts=np.arange(count + 1, dtype=np.int32) * query_len,
        seq_lens=np.array(lens, dtype=np.int32),
        tables=[np.full((count, width), 9, dtype=np.int32)],
        slots=[numbers + 500],
        logits_rows=numbers,
    )


@pytest.mark.parametrize("name", ["sim", "cpu"])
@pytest.mark.parametrize("query_len", [1, 2])
def test_padding_is_requests_of_their_own_in_the_null_block(name: str, query_len: int) -> None:
    """The contract: query of the step's width, as many keys, block 0, slot -1; and nothing is left of older steps."""
    pytest.importorskip(f"core_{name}")
    buffers = StepBuffers(DeviceCopies(_open(name)[0]), 8, query_len, table_width=6, num_groups=1)
    large, small = buffers.batch(8), buffers.batch(4)
    buffers.fill(_arrays([30] * 8, query_len, 5), large)
    buffers.fill(_arrays([7, 9, 11], query_len, 2), small)
    group, start = small.groups[0], 3 * query_len
    assert small.num_valid_tokens.tolist() == [start]
    assert small.token_ids.tolist()[:start] == list(range(100, 100 + start))
    assert small.positions.tolist()[start:] == list(range(query_len))
    assert group.slots.tolist()[start:] == [-1] * query_len
    assert group.seq_lens.tolist() == list(group.seq_lens_host) == [7, 9, 11, query_len]
    assert group.block_table.tolist() == [[9, 9, 0, 0, 0, 0]] * 3 + [[0] * 6]
    assert small.query_start_loc.tolist() == list(small.query_start_loc_host) == [i * query_len for i in range(5)]
    buffers.fill(_arrays([7] * 8, query_len, 1), large)
    assert large.groups[0].block_table.tolist() == [[9, 0, 0, 0, 0, 0]] * 8


def test_sim_refuses_what_no_graph_can_hold() -> None:
    """Host reads while it records, another plan, inputs that moved: each is a fault, as it would be on a real chip."""
    pytest.importorskip("core_sim")
    from core_sim.kernels import SimFault

    backend = _open("sim")[0]
    x = torch.ones(3)
    with pytest.raises(SimFault, match="host reads the device"):
        backend.capture(lambda: bool((x > 0).all()), [])
    graph = backend.capture(lambda: x * 2, [])
    x.fill_(4.0)
    assert graph.replay([]).tolist() == [8.0] * 3
    doubled: Tensor = graph.replay([])
    assert doubled is graph.replay([])
