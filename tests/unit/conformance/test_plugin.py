"""The suite as a judge: what counts as run, and that nothing can be left out unseen."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError
from core_conformance import Outcome, Report, load_target, run_suite
from core_conformance.records import Mode
from core_conformance.waivers import Waiver, read_waivers

HEAD = """
import pytest
from core_conformance.checks import check
from core_conformance.records import UnsupportedOutcome
"""
Plant = Callable[..., Report]
NUMBERS = itertools.count()


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Runs a suite of one planted file."""

    def run(source: str, expected: list[str], **options: Any) -> Report:
        # A name of its own for each: in one process a module is imported once.
        folder = tmp_path / f"suite_{next(NUMBERS)}"
        folder.mkdir()
        (folder / f"test_l0_{folder.name}.py").write_text(HEAD + source, encoding="utf-8")
        return run_suite(load_target("reference"), ["L0"], suite=folder, expected=expected, **options)

    return run


def outcomes(report: Report) -> dict[str, Outcome]:
    return {record.id: record.outcome for record in report.records}


def reason(report: Report, check_id: str) -> str:
    return next(record.reason for record in report.records if record.id == check_id)


def test_a_passing_check_leaves_a_record(plant: Plant) -> None:
    report = plant("@check('L0/a', ['x', 'y'])\ndef test_a(subject, variant):\n    pass\n", ["L0/a/x", "L0/a/y"])
    assert report.ok and report.complete("L0")
    assert outcomes(report) == {"L0/a/x": Outcome.PASS, "L0/a/y": Outcome.PASS}
    document = json.loads(report.to_json())
    assert document["run"]["backend"] == "reference" and len(document["run"]["suite_hash"]) == 64
    assert {record["mode"] for record in document["records"]} == {Mode.SIMULATED}


@pytest.mark.parametrize(
    "body",
    [
        "@check('L0/a')\ndef test_a():\n    pytest.skip('not today')\n",
        "@check('L0/a')\n@pytest.mark.skip(reason='not today')\ndef test_a():\n    pass\n",
        "@check('L0/a')\n@pytest.mark.skipif(True, reason='x')\ndef test_a():\n    pass\n",
        "@check('L0/a')\n@pytest.mark.xfail\ndef test_a():\n    assert False\n",
        "@check('L0/a')\ndef test_a():\n    pytest.xfail('known')\n",
        "@pytest.fixture\ndef lazy():\n    pytest.skip('x')\n@check('L0/a')\ndef test_a(lazy):\n    pass\n",
    ],
    ids=["skip", "mark-skip", "mark-skipif", "mark-xfail", "xfail", "fixture-skip"],
)
def test_a_raw_skip_or_xfail_is_an_error(plant: Plant, body: str) -> None:
    report = plant(body, ["L0/a"])
    assert outcomes(report) == {"L0/a": Outcome.ERROR} and not report.ok


def test_a_file_that_skips_itself_is_an_error(plant: Plant) -> None:
    report = plant("pytest.skip('no such device', allow_module_level=True)\n", ["L0/a"])
    assert not report.ok and "was not collected" in report.problems[0]
    assert outcomes(report) == {"L0/a": Outcome.ERROR}


def test_a_missing_a_foreign_and_a_doubled_id_are_errors(plant: Plant) -> None:
    body = "@check('L0/a')\ndef test_a():\n    pass\n@check('L0/b')\ndef test_b():\n    pass\n"
    report = plant(body, ["L0/a", "L0/gone"])
    assert outcomes(report) == {"L0/a": Outcome.PASS, "L0/b": Outcome.ERROR, "L0/gone": Outcome.ERROR}
    assert "was not collected" in reason(report, "L0/gone") and not report.ok
    report = plant(body.replace("L0/b", "L0/a"), ["L0/a"])
    assert outcomes(report) == {"L0/a": Outcome.ERROR} and not report.ok


def test_a_test_without_an_id_is_a_problem(plant: Plant) -> None:
    report = plant("def test_a():\n    pass\n", [])
    assert not report.ok and "has no conformance id" in report.problems[0]


def test_unsupported_is_acceptable_unless_mandatory(plant: Plant) -> None:
    body = "def test_a():\n    raise UnsupportedOutcome('no unit for it')\n"
    report = plant("@check('L0/a')\n" + body, ["L0/a"])
    assert outcomes(report) == {"L0/a": Outcome.UNSUPPORTED} and report.ok
    report = plant("@check('L0/a', mandatory=True)\n" + body, ["L0/a"])
    assert outcomes(report) == {"L0/a": Outcome.FAIL} and not report.ok


def test_failing_is_told_with_the_reason_and_does_not_stop_the_rest(plant: Plant) -> None:
    body = (
        "@check('L0/a')\ndef test_a():\n    assert 1 == 2, 'one is not two'\n@check('L0/b')\ndef test_b():\n    1 / 0\n"
    )
    report = plant(body + "@check('L0/c')\ndef test_c():\n    pass\n", ["L0/a", "L0/b", "L0/c"])
    assert list(outcomes(report).values()) == [Outcome.FAIL, Outcome.FAIL, Outcome.PASS]
    assert "one is not two" in reason(report, "L0/a") and "ZeroDivisionError" in reason(report, "L0/b")
    assert "FAIL    L0/a" in report.summary() and "NOT complete" in report.summary()


def test_what_is_not_selected_is_not_run_and_the_level_is_incomplete(plant: Plant) -> None:
    body = "@check('L0/a')\ndef test_a():\n    assert False\n@check('L0/b')\ndef test_b():\n    pass\n"
    report = plant(body, ["L0/a", "L0/b"], select=lambda check_id: check_id == "L0/b")
    assert outcomes(report) == {"L0/a": Outcome.NOT_RUN, "L0/b": Outcome.PASS}
    assert report.ok and not report.complete("L0")
    assert not plant(body, ["L0/a", "L0/b"], select=lambda check_id: False).ok, "a run of nothing shows nothing"


@pytest.mark.parametrize(
    ("days", "ids", "expected"),
    [
        (1, ("L0/a",), Outcome.WAIVED),
        (1, ("L0/*",), Outcome.WAIVED),
        (-1, ("L0/a",), Outcome.FAIL),
        (1, ("L0/b",), Outcome.FAIL),
    ],
)
def test_waivers_cover_named_ids_until_they_expire(
    plant: Plant, days: int, ids: tuple[str, ...], expected: Outcome
) -> None:
    expires = datetime.date.today() + datetime.timedelta(days=days)
    waiver = Waiver(ids=ids, backend="reference", hardware="reference", url="https://example.org/1", expires=expires)
    report = plant("@check('L0/a')\ndef test_a():\n    assert False, 'broken'\n", ["L0/a"], waivers=[waiver])
    assert outcomes(report) == {"L0/a": expected} and report.ok is (expected is Outcome.WAIVED)
    assert "broken" in reason(report, "L0/a")


def test_waivers_are_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    entry = "[[waiver]]\nids = ['L1/x']\nbackend = 'acme'\nhardware = 'acme-1'\nurl = 'https://example.org'\n"
    path.write_text(entry + "expires = 2030-01-01\n", encoding="utf-8")
    assert read_waivers(path)[0].expires == datetime.date(2030, 1, 1)
    path.write_text(entry, encoding="utf-8")
    with pytest.raises(ConfigError, match="expires"):
        read_waivers(path)
