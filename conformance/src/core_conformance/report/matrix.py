"""Models by backends: what each pair was shown to do, from one or more reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core_conformance.records import Outcome, Record, level_of
from core_conformance.report.document import Report, weakest_mode

__all__ = ["FAILED", "OPERATIONS", "UNSUPPORTED", "UNTESTED", "WORDS", "Cell", "Column", "Matrix", "build_matrix"]

OPERATIONS = "operations"
"""The row of the checks that drive no model: L0 and L1."""
UNTESTED, FAILED, UNSUPPORTED = "UNTESTED", "FAILED", "UNSUPPORTED"
WORDS = {
    "VALIDATED": "ran on the device",
    "SIMULATED": "ran on something that stands in for the device",
    "COMPILED": "the device's compiler took it; nothing ran",
    UNTESTED: "no report speaks of it",
    UNSUPPORTED: "the backend declares that it cannot, and refuses",
    FAILED: "not even the first level is complete",
}
"""Every word of a cell, and what it means."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A backend on one kind of device.

    Args:
        backend: Its name.
        arch: `DeviceInfo.arch`.
        name: The device for people.
    """

    backend: str
    arch: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one backend.

    Args:
        word: One of WORDS.
        level: Highest Ln with L0 to Ln complete for this model; empty where none is.
        report: Where it comes from; None where untested.
        records: What ran of the model and of no model.
    """

    word: str = UNTESTED
    level: str = ""
    report: Report | None = None
    records: tuple[Record, ...] = ()

    @property
    def worst(self) -> Record | None:
        """The record nearest to its bound, or farthest beyond it; None where none has one."""
        measured = [record for record in self.records if record.ratio is not None]
        return max(measured, key=lambda record: record.ratio or 0.0, default=None)

    @property
    def failures(self) -> list[Record]:
        """What ran and is not acceptable."""
        return [record for record in self.records if record.ran and not record.outcome.acceptable]

    @property
    def waived(self) -> list[Record]:
        """Failures that a waiver covers."""
        return [record for record in self.records if record.outcome is Outcome.WAIVED]

    @property
    def operations(self) -> dict[str, str]:
        """Each operation to how it was done: "NATIVE", "COMPOSITE", or both where it depends on type or shape."""
        found: dict[str, set[str]] = {}
        for record in self.records:
            for name, kind in record.kinds.items():
                found.setdefault(name, set()).add(kind)
        return {name: " and ".join(sorted(kinds, reverse=True)) for name, kinds in sorted(found.items())}


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Models by backends.

    Args:
        rows: OPERATIONS, then the models.
        columns: The backends.
        cells: One for each pair.
        reports: What it was made from, the newest first.
    """

    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, Column], Cell]
    reports: tuple[Report, ...]

    @property
    def note(self) -> str:
        """What a reader must know before comparing cells; empty where nothing."""
        suites = {report.facts.suite_hash for report in self.reports}
        if len(suites) < 2:
            return ""
        return (
            f"The reports come from {len(suites)} versions of the suite: cells were not all judged by the same checks"
        )


def build_matrix(reports: Sequence[Report]) -> Matrix:
    """The matrix of these reports; where several speak of a pair the strongest evidence counts, then the newest."""
    newest = sorted(reports, key=lambda report: report.facts.date, reverse=True)
    models = sorted({record.model for report in newest for record in report.records if record.model})
    rows = (OPERATIONS, *models)
    columns = tuple(sorted({_column(report) for report in newest}, key=lambda c: (c.backend, c.arch, c.name)))
    cells = {}
    for column in columns:
        mine = [report for report in newest if _column(report) == column]
        for row in rows:
            found = [cell for report in mine if (cell := _cell(report, row)).word != UNTESTED]
            # max keeps the first of equals, which is the newest.
            cells[row, column] = max(found, key=lambda cell: _strength(cell), default=Cell())
    return Matrix(rows=rows, columns=columns, cells=cells, reports=tuple(newest))


def _column(report: Report) -> Column:
    device = report.facts.device
    return Column(backend=report.facts.backend, arch=device.arch, name=device.name)


def _strength(cell: Cell) -> int:
    return weakest_mode(cell.records, cell.report.facts.mode).rank if cell.report is not None else -1


def _cell(report: Report, row: str) -> Cell:
    model = "" if row == OPERATIONS else row
    own = [r for r in report.records if r.ran and r.model == model and (model or level_of(r.id) in ("L0", "L1"))]
    if not own:
        return Cell()
    levels = _levels_of(report, model)
    reached = ""
    for level, records in levels.items():
        if report.problems or not all(record.outcome.acceptable for record in records):
            break
        reached = level
    evidence = tuple(record for level in levels.values() for record in level if record.ran)
    if all(record.outcome is Outcome.UNSUPPORTED for record in own):
        word, reached = UNSUPPORTED, ""
    else:
        word = str(weakest_mode(own, report.facts.mode)) if reached else FAILED
    return Cell(word=word, level=reached, report=report, records=evidence)


def _levels_of(report: Report, model: str) -> dict[str, list[Record]]:
    """L0, L1, ... without a gap, each with the records that decide it for the model: its own and those of no model."""
    found: dict[str, list[Record]] = {}
    for number in range(5 if model else 2):
        records = report.of_level(f"L{number}")
        if not records:
            break
        found[f"L{number}"] = [r for r in records if r.model in ("", model)]
    return found
