"""Backends with a deliberate bug: the suite names the operation, the first wrong index, the value and the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from core.backend import Verdict
from core.backend.ops import OpSpec
from core.backend.reference import COMPOSITES
from core.spec import DeviceInfo
from core_conformance import Outcome, Record, Target, run_suite
from core_conformance.bare import INFO, BareBackend
from core_conformance.mutants.backend import mutant_target


def one(target: Target, check_id: str) -> Record:
    report = run_suite(target, [check_id.partition("/")[0]], select=lambda found: found == check_id)
    return next(record for record in report.records if record.id == check_id)


def adds_to_one_element(op: Any) -> Callable[[Any], Any]:
    honest = COMPOSITES["act_mul"](op)

    def act_mul(args: Any) -> Any:
        out = honest(args)
        if len(out):
            out[-1, 3] += 0.5
        return out

    return act_mul


def test_a_wrong_element_is_named_with_operation_index_value_and_bound() -> None:
    record = one(mutant_target({"act_mul": adds_to_one_element}), "L1/act_mul/silu-fp32")
    assert record.outcome is Outcome.FAIL
    assert record.reason.startswith("act_mul(dtype=float32, size=64): result[0, 3] is ")
    assert "expected" in record.reason and "bound" in record.reason and "1 of 64 elements" in record.reason
    assert record.ratio is not None and record.ratio > 1 and record.kinds == {"act_mul": "NATIVE"} and record.op_table


class Stale(BareBackend):
    """Says that it has no kernel, and has one."""

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        made: Callable[..., Any] = COMPOSITES[op.name](op)
        return made


class Refuses(BareBackend):
    """Declines attention altogether."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.no("it has no attention") if op.name == "attention" else super().supports(op, device)


class Fickle(BareBackend):
    """Says something else once it is open."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.composite("open" if hasattr(self, "device") else "closed")


@pytest.mark.parametrize(
    ("backend", "check_id", "text"),
    [
        (Stale, "L0/declared-unsupported-raises", "the declaration is stale"),
        (Refuses, "L0/mandatory-core", "no backend may decline"),
        (Fickle, "L0/supports-pure", "changes with open()"),
    ],
)
def test_false_declarations_fail(backend: type[BareBackend], check_id: str, text: str) -> None:
    record = one(Target(info=INFO, make=backend), check_id)
    assert record.outcome is Outcome.FAIL and text in record.reason


def test_a_declined_feature_is_unsupported_where_it_may_be() -> None:
    record = one(Target(info=INFO, make=Refuses), "L1/attention/softcap-fp32")
    assert record.outcome is Outcome.UNSUPPORTED and "it has no attention" in record.reason
