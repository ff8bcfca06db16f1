"""`core conformance next`: what it measures, and what it advises."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from core.backend import Kind, OpenConfig, Pending, Verdict
from core.backend.negotiate import Binder
from core.backend.ops import OpSpec, RmsNormOp
from core.backend.reference import COMPOSITES
from core.spec import DeviceInfo, DType
from core_conformance.advice import step_times
from core_conformance.advice.next_operation import advise
from core_conformance.advice.step_times import StepTimes, Stopwatch, measure
from core_conformance.advice.vendor_lines import count_lines
from core_conformance.bare import INFO, BareBackend
from core_conformance.cli import app
from core_conformance.commands import next as command
from core_conformance.engines.models import model_folder
from core_conformance.target import Target


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The clock of measurements, few steps, and one thread: what is measured here is not the machine."""
    clock, threads = Clock(), torch.get_num_threads()
    monkeypatch.setattr(step_times, "perf_counter", clock)
    monkeypatch.setattr(step_times, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(step_times, "_DECODE_STEPS", 3)
    torch.set_num_threads(1)
    yield clock
    torch.set_num_threads(threads)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., None]:
    """Makes operations of the reference take so many seconds."""

    def make_slow(**seconds: float) -> None:
        for name, took in seconds.items():
            monkeypatch.setitem(COMPOSITES, name, _taking(took, COMPOSITES[name], clock))

    return make_slow


def _taking(seconds: float, make: Callable[[Any], Callable[[Any], Any]], clock: Clock) -> Callable[[Any], Any]:
    def maker(op: OpSpec) -> Callable[[Any], Any]:
        fn = make(op)

        def run(args: Any) -> Any:
            clock.now += seconds
            return fn(args)

        return run

    return maker


class NativeNorm(BareBackend):
    """Its only kernel is the reference's."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.native() if op.name == "rms_norm" else super().supports(op, device)

    def bind(self, op: OpSpec) -> Callable[[Any], Any]:
        return COMPOSITES["rms_norm"](op) if op.name == "rms_norm" else super().bind(op)


def measured() -> StepTimes:
    return measure(Target(info=INFO, make=NativeNorm), model_folder("llama"))


def test_the_advice_is_the_slowest_operation_that_has_no_kernel(slow: Callable[..., None]) -> None:
    slow(rms_norm=5.0, embed=3.0, rope=1.0)
    times = measured()
    advice = advise(times)
    assert (times.num_steps["decode"], times.num_steps["prefill"]) == (3, 3)
    slowest = advice.operations[0]
    assert (slowest.operation, slowest.kind) == ("rms_norm", "NATIVE")
    assert slowest.decode_calls == 5  # two layers with two norms each, and the last one
    step = 5 * 5.0 + 3.0 + 2 * 1.0
    assert slowest.decode == slowest.prefill == pytest.approx(25.0 / step)
    assert advice.next is not None and advice.next.operation == "embed"
    assert advice.next.decode_calls == advice.next.prefill_calls == 1
    assert advice.next.decode == pytest.approx(3.0 / step)
    [spec] = advice.next.specs
    assert spec.spec.startswith("embed(") and spec.reason == "it has no kernels"
    assert advice.outside_decode == advice.outside_prefill == pytest.approx(0.0)


def test_the_time_of_a_part_is_not_its_wholes(clock: Clock) -> None:
    watch, binder = watched(BareBackend())
    part, whole = (RmsNormOp(dtype=DType.FLOAT32, dim=dim, eps=1e-6) for dim in (4, 8))

    def take(seconds: float) -> None:
        clock.now += seconds

    inner = watch(binder.resolve(part), lambda args: take(3.0))
    watch(binder.resolve(whole), lambda args: (take(1.0), inner(args), take(1.0)))(None)
    assert watch.times[part].seconds["decode"] == 3.0
    assert watch.times[whole].seconds["decode"] == 2.0


class Late(BareBackend):
    """A device that works behind the host's back: what was submitted is done when a fence was waited for.

    Args:
        clock: Passes while the device works.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.owed = 0.0

    def fence(self) -> Pending:
        return _Owed(self)


class _Owed(Pending):
    __slots__ = ("_backend",)

    def __init__(self, backend: Late) -> None:
        self._backend = backend

    def wait(self) -> None:
        self._backend.clock.now += self._backend.owed
        self._backend.owed = 0.0


def watched(backend: BareBackend) -> tuple[Stopwatch, Binder]:
    backend.open(0, OpenConfig())
    watch = Stopwatch(backend)
    watch.phase = "decode"
    return watch, Binder(backend, INFO, backend.probe()[0], block_size=16)


def test_work_of_the_device_counts_for_the_operation_that_submitted_it(clock: Clock) -> None:
    backend = Late(clock)
    watch, binder = watched(backend)
    op = RmsNormOp(dtype=DType.FLOAT32, dim=4, eps=1e-6)
    timed = watch(binder.resolve(op), lambda args: setattr(backend, "owed", 2.0))
    backend.owed = 10.0  # of whatever came before
    timed(None)
    assert watch.times[op].seconds["decode"] == 2.0
    assert watch.times[op].calls["decode"] == 1


def test_nothing_is_advised_where_everything_is_native(slow: Callable[..., None]) -> None:
    slow(rms_norm=1.0)
    times = measured()
    only = [entry for entry in times.operations if entry.row.kind is Kind.NATIVE]
    assert {entry.op.name for entry in only} == {"rms_norm"}
    advice = advise(StepTimes(times.model, times.dtype, only, times.num_steps, times.seconds))
    assert advice.next is None and advice.to_json()["next"] is None
    assert list(command._told(advice, "acme")) == ["everything is NATIVE"]


def test_json_says_what_the_table_says(slow: Callable[..., None]) -> None:
    slow(linear=2.0, attention=1.0)
    done = CliRunner().invoke(app, ["next", "--backend", "reference", "--model", str(model_folder("llama")), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    names = {row["operation"] for row in told["operations"]}
    assert {"linear", "attention", "rms_norm", "rope", "kv_write", "embed", "sample", "act_mul"} <= names
    assert told["backend"] == "reference:0" and told["vendor_lines"] > 0
    assert told["next"] == "linear" and told["operations"][1]["operation"] == "attention"


@pytest.mark.parametrize("flags", [["--backend", "nosuch"], ["--backend", "reference", "--model", "nosuch"]])
def test_a_mistake_is_an_error_that_names_it(flags: list[str]) -> None:
    done = CliRunner().invoke(app, ["next", *flags])
    assert done.exit_code != 0 and "nosuch" in str(done.exception)


def test_lines_are_those_that_are_neither_blank_nor_a_comment(tmp_path: Path) -> None:
    text = '"""What it is."""\n\nimport x  # why\n\n    # a comment\nif x:\n    y = "#"\n'
    assert count_lines(text) == 4
    assert count_lines("") == 0
