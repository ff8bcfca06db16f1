"""The committed must-pass lists, the ids that the contract names, and the generated page."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_conformance import load_target, run_suite
from core_conformance.interface import conformance_ids, render
from core_conformance.must_pass_lists import LEVELS, must_pass

REPO_ROOT = Path(__file__).parents[3]


def test_the_lists_are_exactly_what_is_collected() -> None:
    report = run_suite(load_target("reference"), LEVELS, select=lambda check_id: False)
    assert not report.failures and not report.problems, report.summary()
    assert sorted(must_pass(LEVELS)) == [record.id for record in report.records]


@pytest.mark.parametrize("level", LEVELS)
def test_lists_are_sorted_and_of_their_level(level: str) -> None:
    ids = must_pass([level])
    assert ids == sorted(set(ids)) and len(ids) > 20
    assert all(check_id.startswith(f"{level}/") for check_id in ids)


def test_every_id_that_the_contract_names_exists() -> None:
    known = must_pass(LEVELS)
    for method, names in conformance_ids().items():
        assert names, f"the docstring of {method} names no check after 'Conformance:'"
        for name in names:
            assert any(i == name or i.startswith(f"{name}/") for i in known), (
                f"{method} names {name}, which is not there"
            )


def test_the_interface_page_is_current() -> None:
    page = (REPO_ROOT / "docs" / "interface.md").read_text(encoding="utf-8")
    assert page == render(), "write it anew: python -m core_conformance.interface > docs/interface.md"


def test_every_outcome_and_level_is_explained() -> None:
    page = (REPO_ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    words = [*LEVELS, "PASS", "FAIL", "UNSUPPORTED", "WAIVED", "ERROR", "NOT_RUN", "VALIDATED", "SIMULATED", "COMPILED"]
    assert not [word for word in words if word not in page]
