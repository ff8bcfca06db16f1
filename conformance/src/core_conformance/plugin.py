"""The pytest plugin: stable ids, outcomes in place of pytest's, and a record for each check."""

from __future__ import annotations

import inspect
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
_OWN_PLUGINS = ("_pytest", "core_conformance")
_FOUND = ("err", "bound", "ratio", "op_table", "kinds", "notes", "model", "dtype", "quantization", "parallelism")
"""Fields of a record that its check found out."""


class SuitePlugin:
    """Runs collected checks against one backend; registered with `pytest.main(plugins=[...])`.

    Args:
        target: The backend under test.
        suite: Folder that every check must come from.
        select: Whether to run the check of an id; the others become NOT_RUN.
        order: Sort key of ids; those with an equal key keep the order of the files.
        begin: Called with each id before it runs, and with "" behind the last.
        progress: Called with each record as it is made.
    """

    def __init__(
        self,
        target: Target,
        *,
        suite: Path,
        select: Callable[[str], bool] = lambda check_id: True,
        order: Callable[[str], Any] = lambda check_id: 0,
        begin: Callable[[str], None] = lambda check_id: None,
        progress: Callable[[Record], None] = lambda record: None,
    ) -> None:
        self._target = target
        self._suite = suite
        self._select = select
        self._order = order
        self._begin = begin
        self._progress = progress
        self._ids: dict[str, str] = {}
        self._subjects: dict[str, Subject | Findings] = {}
        self.records: dict[str, Record] = {}
        self.collected: list[str] = []
        """Every id that was found, in order, repeats included."""
        self.mandatory: list[str] = []
        """Those of them that no backend may decline."""
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
            mark = item.get_closest_marker(MARK)
            self.mandatory += [check_id] * bool(mark is not None and mark.kwargs.get("mandatory"))
            if (place := _foreign_place(item, self._suite)) is not None:
                self._error(check_id, f"its code is not the suite's, it comes from {place}")
            elif not self._select(check_id):
                self._add(Record(id=check_id, outcome=Outcome.NOT_RUN, reason="not selected", mode=self._target.mode))
            elif (raw := _forbidden_mark(item)) is not None:
                self._error(check_id, f"it is marked {raw}; the suite decides what counts, not a mark")
            else:
                kept.append(item)
        items[:] = sorted(kept, key=lambda item: self._order(self._ids[item.nodeid]))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Plugins that came with a file of the suite are no part of it."""
        self._refuse_plugins(session.config)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Nor are those that came while it ran."""
        self._refuse_plugins(session.config)
        self._begin("")

    def _refuse_plugins(self, config: pytest.Config) -> None:
        for name, plugin in config.pluginmanager.list_name_plugin():
            if plugin is None or plugin is self:
                continue
            module = getattr(plugin, "__name__", None) or type(plugin).__module__
            problem = (
                f"pytest plugin {name} ({module}) is loaded into the suite; only pytest's own and the suite's may be"
            )
            if module.partition(".")[0] not in _OWN_PLUGINS and problem not in self.problems:
                self.problems.append(problem)

    def _id_of(self, item: pytest.Item) -> str:
        mark = item.get_closest_marker(MARK)
        if mark is None:
            self.problems.append(f"{item.nodeid} has no conformance id")
            return item.nodeid
        name, callspec = str(mark.args[0]), getattr(item, "callspec", None)
        if callspec is None:
            return name
        return f"{name}{'-' if name.count('/') > 1 else '/'}{callspec.id}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        """Says which check begins."""
        self._begin(self._ids.get(item.nodeid, item.nodeid))
        return (yield)

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
            facts = {name: getattr(subject, name) for name in _FOUND}
        self._add(Record(id=check_id, outcome=outcome, reason=reason, seconds=seconds, mode=self._target.mode, **facts))

    def _error(self, check_id: str, reason: str) -> None:
        self._add(Record(id=check_id, outcome=Outcome.ERROR, reason=reason, mode=self._target.mode))

    def _add(self, record: Record) -> None:
        self.records[record.id] = record
        self._progress(record)

    def expect(self, must_pass: Sequence[str], mandatory: Sequence[str] | None = None) -> None:
        """Makes an ERROR record of every id that is missing, too many, or there twice.

        Args:
            must_pass: Every id, as committed.
            mandatory: Those that no backend may decline, as committed; None where there is no such list.
        """
        wanted, found = set(must_pass), set(self.collected)
        for check_id in sorted(wanted - found):
            self._error(check_id, "it is in the must-pass list and was not collected")
        for check_id in sorted(found - wanted):
            self._error(check_id, f"it is not in the must-pass list of {level_of(check_id)}")
        for check_id in sorted({name for name in found if self.collected.count(name) > 1}):
            self._error(check_id, "two checks have this id")
        for check_id in sorted(set(self.mandatory) ^ set(self.mandatory if mandatory is None else mandatory)):
            self._error(check_id, "its mark and the list of mandatory ids do not agree")


def _forbidden_mark(item: pytest.Item) -> str | None:
    return next((name for name in _FORBIDDEN if item.get_closest_marker(name) is not None), None)


def _foreign_place(item: pytest.Item, suite: Path) -> str | None:
    """Where the check's code comes from, if not from the suite: a module or function that took its place."""
    function = getattr(item, "function", None)
    module = getattr(item, "module", None)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    places = [item.path, Path(getattr(module, "__file__", None) or "nowhere")]
    places.append(Path(code.co_filename if code is not None else "nowhere"))
    own = (suite.resolve(), Path(__file__).resolve().parent)
    return next((str(p) for p in places if not any(p.resolve().is_relative_to(folder) for folder in own)), None)


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
