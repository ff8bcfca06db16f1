"""Reports in Markdown: the summary of one run, and the matrix of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from core_conformance.records import Outcome, Record
from core_conformance.report.document import Report, count_outcomes
from core_conformance.report.matrix import UNTESTED, WORDS, Cell, Matrix
from core_conformance.report.trend import Move, Trend

__all__ = ["matrix_markdown", "summary_markdown"]

_MOST = 20
"""Rows of a list; the others are in the report."""


def summary_markdown(report: Report) -> str:
    """One run: level by level, what it ran on, and everything that is not a plain PASS."""
    facts = report.facts
    reached = report.level_reached or "no level"
    lines = [
        f"# {facts.backend}: {reached} {facts.mode}",
        "",
        "| level | | checks | worst err/bound | seconds |",
        "|---|---|---|---|---|",
    ]
    for level in facts.levels:
        records = report.of_level(level)
        worst = max((r for r in records if r.ratio is not None), key=lambda r: r.ratio or 0.0, default=None)
        state = "complete" if report.complete(level) else "**not complete**"
        seconds = sum(record.seconds for record in records)
        lines.append(f"| {level} | {state} | {count_outcomes(records)} | {_margin(worst)} | {seconds:.1f} |")
    lines += ["", *_facts(report), *_problems(report)]
    lines += _records("Not acceptable", report.failures)
    lines += _records("Waived", [r for r in report.records if r.outcome is Outcome.WAIVED])
    lines += _records("Unsupported", [r for r in report.records if r.outcome is Outcome.UNSUPPORTED])
    return "\n".join(lines) + "\n"


def matrix_markdown(matrix: Matrix, trends: Sequence[Trend] = ()) -> str:
    """Models by backends, the failures, the trends, and what the reports were made with."""
    heads = [f"{c.backend} ({', '.join(dict.fromkeys(filter(None, (c.name, c.arch))))})" for c in matrix.columns]
    lines = ["# Conformance", "", f"| model | {' | '.join(map(_cut, heads))} |", f"|---|{'---|' * len(heads)}"]
    for row in matrix.rows:
        cells = [_cell(matrix.cells[row, column]) for column in matrix.columns]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    used = dict.fromkeys(cell.word for cell in matrix.cells.values())
    lines += ["", *(f"- {word}: {WORDS[word]}" for word in WORDS if word in used or word == UNTESTED), ""]
    if matrix.note:
        lines += [matrix.note, ""]
    for trend in trends:
        lines += _trend(trend)
    for report in matrix.reports:
        lines += [f"## Report of {report.facts.backend}, {report.facts.date}", "", *_facts(report), *_problems(report)]
        lines += _records("Not acceptable", report.failures)
    return "\n".join(lines).rstrip() + "\n"


def _cell(cell: Cell) -> str:
    failed = f", {len(cell.failures)} failed" if cell.failures else ""
    margin = "" if cell.worst is None or cell.worst.ratio is None else f", err/bound {cell.worst.ratio:.2f}"
    return " ".join(filter(None, (cell.word, cell.level))) + failed + margin


def _facts(report: Report) -> list[str]:
    facts = report.facts
    device = facts.device
    packages = "; ".join(
        f"{package.name} {package.version}{_origin(package.source, package.revision, package.dirty)}"
        for package in facts.packages.values()
    )
    rows = {
        "device": f"{device.name or device.arch} ({device.arch}), {device.sdk}",
        "packages": packages,
        "suite hash": facts.suite_hash[:16],
        "versions": f"contract {facts.contract}, torch {facts.torch}, Python {facts.python}",
        "host": facts.machine,
        "date": f"{facts.date}, {facts.seconds:.0f} s",
        "selection": facts.selection or "everything",
        "standing": "self-reported",
    }
    return ["| run | |", "|---|---|", *(f"| {name} | {_cut(value)} |" for name, value in rows.items()), ""]


def _origin(source: str, revision: str, dirty: bool) -> str:
    return f" ({source}{f' {revision[:10]}' if revision else ''}{', uncommitted changes' if dirty else ''})"


def _problems(report: Report) -> Iterator[str]:
    if report.problems:
        yield from ("## What kept the suite from being run as it must be", "")
        yield from (f"- {_cut(problem)}" for problem in report.problems)
        yield ""


def _records(title: str, records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    yield from (f"### {title}: {len(records)}", "", "| id | outcome | why |", "|---|---|---|")
    yield from (f"| `{r.id}` | {r.outcome} | {_cut(r.reason)} |" for r in records[:_MOST])
    if len(records) > _MOST:
        yield f"| {len(records) - _MOST} more | | in report.json |"
    yield ""


def _trend(trend: Trend) -> Iterator[str]:
    old, new = trend.old.facts, trend.new.facts
    yield from (f"## {new.backend} since {old.date} ({old.package.version} to {new.package.version})", "")
    if trend.still:
        yield from ("Nothing moved.", "")
    yield from _records("New failures", trend.failures)
    yield from _moves("Nearer to their bound", trend.nearer)
    yield from _moves("Farther from it", trend.farther)
    for title, ids in (("Mended", trend.mended), ("Came", trend.came), ("Went", trend.went)):
        if ids:
            told = ", ".join(f"`{name}`" for name in ids[:_MOST])
            yield from (f"### {title}: {len(ids)}", "", told + (" and more" if len(ids) > _MOST else ""), "")


def _moves(title: str, moves: Sequence[Move]) -> Iterator[str]:
    if moves:
        yield from (f"### {title}: {len(moves)}", "", "| id | err/bound before | now |", "|---|---|---|")
        yield from (f"| `{move.id}` | {move.before:.3f} | {move.after:.3f} |" for move in moves[:_MOST])
        yield ""


def _margin(worst: Record | None) -> str:
    return "" if worst is None else f"{worst.ratio:.2f} (`{worst.id}`)"


def _cut(text: str, most: int = 400) -> str:
    """One line of a table's cell."""
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= most else flat[: most - 1] + "…"
