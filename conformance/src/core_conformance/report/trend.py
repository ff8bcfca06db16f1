"""What changed between two reports of one backend: which numbers moved towards their bound, what broke, what went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from core_conformance.records import Record
from core_conformance.report.document import Report

__all__ = ["Move", "Trend", "compare_reports", "trends_since"]

_FACTOR, _STEP = 1.1, 0.01
"""A ratio has moved where it changed by more than a tenth and by more than a hundredth of the bound."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """An id whose err/bound changed.

    Args:
        id: Which.
        before: err/bound in the old report.
        after: In the new one; 1 is the bound.
    """

    id: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A new report beside an old one of the same backend and device.

    Args:
        old: The old one.
        new: The new one.
        nearer: Moved towards the bound or beyond it, the largest change first.
        farther: Moved away from it.
        failures: Acceptable before, not acceptable now.
        mended: The other way round.
        came: Ran now, not before.
        went: Ran before, not now.
    """

    old: Report
    new: Report
    nearer: tuple[Move, ...]
    farther: tuple[Move, ...]
    failures: tuple[Record, ...]
    mended: tuple[str, ...]
    came: tuple[str, ...]
    went: tuple[str, ...]

    @property
    def still(self) -> bool:
        """Whether nothing changed."""
        return not any((self.nearer, self.farther, self.failures, self.mended, self.came, self.went))


def trends_since(reports: Sequence[Report], olds: Iterable[Report]) -> list[Trend]:
    """A trend for each report that an old one of the same backend and device stands beside."""
    by_key = {_key(old): old for old in olds}
    return [compare_reports(by_key[_key(report)], report) for report in reports if _key(report) in by_key]


def compare_reports(old: Report, new: Report) -> Trend:
    """What changed from one to the other."""
    before = {record.id: record for record in old.records if record.ran}
    after = {record.id: record for record in new.records if record.ran}
    both = sorted(before.keys() & after.keys())
    moves = [
        Move(id=check_id, before=first, after=second)
        for check_id in both
        if (first := before[check_id].ratio) is not None and (second := after[check_id].ratio) is not None
    ]
    nearer = [move for move in moves if _moved(move.before, move.after)]
    farther = [move for move in moves if _moved(move.after, move.before)]
    broken = [after[name] for name in both if before[name].outcome.acceptable and not after[name].outcome.acceptable]
    return Trend(
        old=old,
        new=new,
        nearer=tuple(sorted(nearer, key=lambda move: move.before - move.after)),
        farther=tuple(sorted(farther, key=lambda move: move.after - move.before)),
        failures=tuple(broken),
        mended=tuple(n for n in both if not before[n].outcome.acceptable and after[n].outcome.acceptable),
        came=tuple(sorted(after.keys() - before.keys())),
        went=tuple(sorted(before.keys() - after.keys())),
    )


def _moved(low: float, high: float) -> bool:
    return high > low * _FACTOR and high - low > _STEP


def _key(report: Report) -> tuple[str, str]:
    return report.facts.backend, report.facts.device.arch
