"""The pytest plugin: stable ids, outcomes in place of pytest's, and a record for each check."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from core_conformance.checks import MARK
from core_conformance.records import ErrorOutcome, Findings, Outcome, Record, UnsupportedOutcome, level_of
from core_conformance.subject import Mismatch, Subject
from core_conformance.target import Target

__all__ = ["SuitePlugin"]

_FORBIDDEN = ("skip", "skipif", "xfail", "flaky")
_LONGEST_REASON = 2000


class SuitePlugin:
    """Runs collected checks against one backend; registered with `pytest.main(plugins=[...])`.

    Args:
        target: The backend under test.
        select: Whether to run the check of an id; the others become NOT_RUN.
        order: Sort key of ids; those with an equal key keep the order of the files.
        progress: Called with each record as it is made.
    """

    def __init__(
        self,
        target: Target,
        *,
        select: Callable[[str], bool] = lambda check_id: True,
        order: Callable[[str], Any] = lambda check_id: 0,
        progress: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._target = target
        self._select = select
        self._order = order
        self._progress = progress
        self._ids: dict[str, str] = {}
        self._subjects: dict[str, Subject | Findings] = {}
        self.records: dict[str, Record] = {}
        self.collected: list[str] = []
        """Every id that was found, in order, repeats included."""
        self.problems: list[str] = []
        """What keeps the suite from being run as it must be."""

    # -- fixtures ----------------------------------------------------------------------------------------------------

    @pytest.fixture(scope="session")
    def target(self) -> Target:
        """The backend under test."""
        return self._target

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest, target: Target) -> Iterator[Subject]:
        """An opened backend with its comparisons; the check runs in inference mode, as the engine does."""
        subject = self._subjects[request.node.nodeid] = Subject(target)
        with torch.inference_mode():
            yield subject

    @pytest.fixture
    def findings(self, request: pytest.FixtureRequest) -> Findings:
        """In place of `subject` for checks that leave the device to another process."""
        findings = self._subjects[request.node.nodeid] = Findings()
        return findings

    @pytest.fixture
    def dice(self, request: pytest.FixtureRequest) -> torch.Generator:
        """Random numbers that depend on the id alone."""
        return torch.Generator().manual_seed(zlib.crc32(self._ids[request.node.nodeid].encode()))

    # -- collection --------------------------------------------------------------------------------------------------

    def pytest_configure(self, config: pytest.Config) -> None:
        """Announces the mark."""
        config.addinivalue_line("markers", f"{MARK}(id, mandatory): the check's stable id")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected, or skips itself, is an error of the suite."""
        if report.outcome != "passed":
            text = str(report.longrepr).strip().splitlines()
            self.problems.append(f"{report.nodeid} was not collected ({report.outcome}): {text[-1] if text else ''}")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Gives each item its id and takes out what was not asked for."""
        kept = []
        for item in items:
            check_id = self._id_of(item)
            self.collected.append(check_id)
            self._ids[item.nodeid] = check_id
            if not self._select(check_id):
                self._add(Record(id=check_id, outcome=Outcome.NOT_RUN, reason="not selected", mode=self._target.mode))
            elif (raw := _forbidden_mark(item)) is not None:
                self._error(check_id, f"it is marked {raw}; the suite decides what counts, not a mark")
            else:
                kept.append(item)
        items[:] = sorted(kept, key=lambda item: self._order(self._ids[item.nodeid]))

    def _id_of(self, item: pytest.Item) -> str:
        mark = item.get_closest_marker(MARK)
        if mark is None:
            self.problems.append(f"{item.nodeid} has no conformance id")
            return item.nodeid
        name, callspec = str(mark.args[0]), getattr(item, "callspec", None)
        if callspec is None:
            return name
        return f"{name}{'-' if name.count('/') > 1 else '/'}{callspec.id}"

    # -- outcomes ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turns pytest's report into a record."""
        report = yield
        outcome, reason = self._judge(item, call, report)
        check_id = self._ids.get(item.nodeid, item.nodeid)
        if outcome is Outcome.UNSUPPORTED:
            report.outcome = "passed"
        elif outcome is Outcome.ERROR:
            report.outcome, report.longrepr = "failed", reason
        if outcome is not None:
            self._record(check_id, outcome, reason, item, report.duration)
        return report

    def _judge(
        self, item: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport
    ) -> tuple[Outcome | None, str]:
        if hasattr(report, "wasxfail"):
            return Outcome.ERROR, "a raw xfail inside the suite"
        if report.skipped:
            return Outcome.ERROR, f"a raw skip inside the suite: {_last_line(report)}"
        if call.excinfo is not None and isinstance(call.excinfo.value, UnsupportedOutcome):
            return self._unsupported(item, str(call.excinfo.value))
        if call.excinfo is not None and isinstance(call.excinfo.value, ErrorOutcome):
            return Outcome.ERROR, str(call.excinfo.value)
        if report.failed:
            return Outcome.FAIL, _reason(call, report)
        return (Outcome.PASS, "") if report.when == "call" else (None, "")

    def _unsupported(self, item: pytest.Item, reason: str) -> tuple[Outcome, str]:
        mark = item.get_closest_marker(MARK)
        if mark is not None and mark.kwargs.get("mandatory"):
            return Outcome.FAIL, f"belongs to the core that no backend may decline: {reason}"
        return Outcome.UNSUPPORTED, reason

    def _record(self, check_id: str, outcome: Outcome, reason: str, item: pytest.Item, seconds: float) -> None:
        before = self.records.get(check_id)
        if before is not None and outcome is Outcome.PASS:
            self._error(check_id, "it ran twice; a rerun inside the suite is an error")
            return
        if before is not None and not before.outcome.acceptable:
            return
        subject = self._subjects.get(item.nodeid)
        facts: dict[str, Any] = {}
        if subject is not None:
            names = ("err", "bound", "ratio", "op_table", "kinds", "notes")
            facts = {name: getattr(subject, name) for name in names}
        self._add(Record(id=check_id, outcome=outcome, reason=reason, seconds=seconds, mode=self._target.mode, **facts))

    def _error(self, check_id: str, reason: str) -> None:
        self._add(Record(id=check_id, outcome=Outcome.ERROR, reason=reason, mode=self._target.mode))

    def _add(self, record: Record) -> None:
        self.records[record.id] = record
        self._progress(record)

    def expect(self, must_pass: Sequence[str]) -> None:
        """Makes an ERROR record of every id that is missing, too many, or there twice."""
        wanted, found = set(must_pass), set(self.collected)
        for check_id in sorted(wanted - found):
            self._error(check_id, "it is in the must-pass list and was not collected")
        for check_id in sorted(found - wanted):
            self._error(check_id, f"it is not in the must-pass list of {level_of(check_id)}")
        for check_id in sorted({name for name in found if self.collected.count(name) > 1}):
            self._error(check_id, "two checks have this id")


def _forbidden_mark(item: pytest.Item) -> str | None:
    return next((name for name in _FORBIDDEN if item.get_closest_marker(name) is not None), None)


def _last_line(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = str(report.longrepr).strip().splitlines()
    return lines[-1] if lines else ""


def _reason(call: pytest.CallInfo[Any], report: pytest.TestReport) -> str:
    """The check's own message; for other exceptions their type, and the place of the suite that ran into it."""
    if call.excinfo is None:
        return _last_line(report)
    error = call.excinfo.value
    text = (str(error).strip().splitlines() or [""])[0][:_LONGEST_REASON]
    if isinstance(error, Mismatch):
        return text
    place = call.excinfo.traceback[-1]
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return f"{kind}{text} ({Path(place.path).name}:{place.lineno + 1})"
