"""Cases that a backend's package brings: found through the hook, run, and told apart when they fail or are no cases."""

from __future__ import annotations

import pytest

from core.backend import Backend
from core.plugins import list_conformance_cases
from core.spec import ConformanceCase
from core_conformance.records import Outcome
from core_conformance.target import load_target
from core_conformance.vendor_cases import run_vendor_cases


def passes(backend: Backend) -> None:
    assert backend.device.type == "cpu"


def fails(backend: Backend) -> None:
    raise ValueError("index 3 is 7, not 5")


def _case(name: str, load: str) -> ConformanceCase:
    return ConformanceCase(id=name, load=load)


def test_outcomes_of_passing_failing_and_invalid_cases() -> None:
    cases = [
        _case("reference/good", f"{__name__}:passes"),
        _case("reference/bad", f"{__name__}:fails"),
        _case("reference/lost", "no_such_module:f"),
        _case("other/good", f"{__name__}:passes"),
    ]
    records = {record.id: record for record in run_vendor_cases(load_target("reference"), cases)}
    outcomes = {name: record.outcome for name, record in records.items()}
    assert outcomes == {
        "reference/good": Outcome.PASS,
        "reference/bad": Outcome.FAIL,
        "reference/lost": Outcome.ERROR,
        "other/good": Outcome.ERROR,
    }
    assert "index 3 is 7" in records["reference/bad"].reason


def test_only_packages_of_the_backend_are_asked() -> None:
    pytest.importorskip("core_sim", reason="core-backend-sim is not installed; pip install -e backends/sim")
    assert [case.id for case in list_conformance_cases("sim")] == ["sim/late-copies", "sim/poisoned-memory"]
    assert list_conformance_cases("nosuch") == []
    records = run_vendor_cases(load_target("sim"), list_conformance_cases("sim"))
    assert [record.outcome for record in records] == [Outcome.PASS, Outcome.PASS]
