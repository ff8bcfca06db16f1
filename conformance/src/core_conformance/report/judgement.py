"""What keeps a report from carrying a certificate, found from its records and not from what it says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from core_conformance.must_pass_lists import LEVELS, mandatory, must_pass
from core_conformance.records import Mode, Outcome, Record, level_of
from core_conformance.report.document import Report

__all__ = ["objections"]

_MOST = 3


def objections(report: Report) -> list[str]:
    """Every reason why no certificate of the levels asked for may be given; empty where it may."""
    return [
        *_of_the_run(report),
        *(package.objection for package in report.facts.packages.values() if package.objection),
        *_of_the_ids(report),
        *(reason for record in report.records if (reason := _of_a_record(report, record))),
    ]


def _of_the_run(report: Report) -> Iterator[str]:
    facts = report.facts
    yield from report.problems
    if facts.selection or facts.shard or facts.models:
        chosen = facts.selection or facts.shard or ", ".join(facts.models)
        yield f"only a part was asked for ({chosen}); run the whole suite"
    if not facts.levels or tuple(facts.levels) != LEVELS[: len(facts.levels)]:
        yield f"the levels {', '.join(facts.levels) or 'none'} do not begin at L0 without a gap; run up to a level"
    if facts.mode is Mode.COMPILED or any(record.mode is Mode.COMPILED for record in report.records):
        yield "COMPILED says that nothing ran; a certificate needs a device or something that stands in for one"
    expected = Mode.SIMULATED if facts.device.simulated else Mode.VALIDATED
    if facts.mode is not expected or any(record.mode is not facts.mode for record in report.records if record.ran):
        yield f"the device {facts.device.arch} is {expected}, and the report says otherwise"


def _of_the_ids(report: Report) -> Iterator[str]:
    """Every id of the levels' lists exactly once, and acceptable."""
    wanted = set(must_pass(report.facts.levels))
    counts = Counter(record.id for record in report.records)
    found = {record.id for record in report.records if level_of(record.id) in LEVELS}
    yield from _some("missing from the report", sorted(wanted - found))
    yield from _some("not in the must-pass lists of this suite", sorted(found - wanted))
    yield from _some("there more than once", sorted(name for name, count in counts.items() if count > 1))
    yield from _some(
        "not run or not acceptable", [record.id for record in report.records if not record.outcome.acceptable]
    )
    declined = {r.id for r in report.records if r.outcome is Outcome.UNSUPPORTED}
    yield from _some("unsupported, which no backend may say of it", sorted(declined & set(mandatory(LEVELS))))


def _of_a_record(report: Report, record: Record) -> str:
    """Whether the outcome is what its own numbers and the waivers say."""
    facts = report.facts
    if record.outcome is Outcome.PASS and record.ratio is not None and not record.ratio <= 1.0:
        return f"{record.id} is called PASS with err/bound {record.ratio:.3g}"
    if record.outcome is Outcome.WAIVED:
        mine = [w for w in facts.waivers if w.covers(record.id, facts.backend, facts.device.arch)]
        if not mine:
            return f"{record.id} is called WAIVED, and no waiver of the report covers it"
        if all(waiver.expired for waiver in mine):
            return f"the waiver of {record.id} expired on {max(waiver.expires for waiver in mine)} ({mine[0].url})"
    return ""


def _some(what: str, ids: Sequence[str]) -> Iterator[str]:
    if ids:
        more = f" and {len(ids) - _MOST} more" if len(ids) > _MOST else ""
        yield f"{len(ids)} id(s) {what}: {', '.join(ids[:_MOST])}{more}"
