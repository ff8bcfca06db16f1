"""A checkpoint that is no part of the suite: run against transformers, and a wrong kernel is seen on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tiny

from core.backend import Verdict
from core.backend.ops import OpSpec
from core.spec import DeviceInfo
from core_conformance.bare import BareBackend
from core_conformance.engines.checkpoint import Checkpoint, checkpoint_ids, run_checkpoint
from core_conformance.records import Outcome, Record
from core_conformance.target import Target, load_target

LEVELS = ("L0", "L1", "L2", "L3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("checkpoint") / "my model")


class WrongGate(BareBackend):
    """Its gate is a little too large."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.native() if op.name == "act_mul" else super().supports(op, device)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        from core.backend.reference import COMPOSITES

        right = COMPOSITES["act_mul"](op)
        return lambda args: right(args) * 1.02


def run(target: Target, checkpoint: Checkpoint, **options: Any) -> dict[str, Record]:
    return {record.id: record for record in run_checkpoint(target, checkpoint, LEVELS, **options)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_passes_on_the_reference(folder: Path, dtype: str) -> None:
    checkpoint = Checkpoint(folder=folder, dtype=dtype)
    begun: list[str] = []
    records = run(load_target("reference"), checkpoint, begin=begun.append)
    assert begun == [*records] == checkpoint_ids(checkpoint, LEVELS)
    assert "L2/checkpoint/my_model-whole" in records
    assert {record.outcome for record in records.values()} == {Outcome.PASS}, records
    for check_id, record in records.items():
        assert (record.model, record.dtype) == ("my_model", dtype) and record.op_table and record.kinds["linear"]
        assert (record.ratio is not None and 0 < record.ratio <= 1) == check_id.startswith("L2/")


def test_a_wrong_kernel_is_seen_and_told(folder: Path) -> None:
    target = dataclasses.replace(load_target("reference"), make=WrongGate)
    records = run(target, Checkpoint(folder=folder, dtype="float32"))
    whole = records["L2/checkpoint/my_model-whole"]
    assert whole.outcome is Outcome.FAIL and "my_model in float32" in whole.reason and "position" in whole.reason
    assert whole.ratio is not None and whole.ratio > 10


def test_what_is_not_selected_is_not_run_and_what_is_no_model_is_an_error(folder: Path, tmp_path: Path) -> None:
    records = run(load_target("reference"), Checkpoint(folder=folder, dtype="float32"), select=lambda check_id: False)
    assert {record.outcome for record in records.values()} == {Outcome.NOT_RUN} and len(records) == 5
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for record in run(load_target("reference"), Checkpoint(folder=tmp_path, dtype="float32")).values():
        assert record.outcome is Outcome.ERROR and "transformers cannot load" in record.reason


def test_the_ids_of_a_level_are_those_that_run(folder: Path) -> None:
    checkpoint = Checkpoint(folder=folder, dtype="float32")
    assert checkpoint_ids(checkpoint, ("L0", "L1")) == []
    assert all(check_id.startswith("L2/") for check_id in checkpoint_ids(checkpoint, ("L0", "L1", "L2")))
