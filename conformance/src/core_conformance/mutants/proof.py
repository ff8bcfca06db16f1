"""Runs the suite against one variant and says what that shows."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core_conformance.bare import INFO, BareBackend
from core_conformance.mutants.variant import Honest, Mutant, Variant
from core_conformance.records import Outcome, Record, level_of
from core_conformance.run import Report, run_suite
from core_conformance.target import Target

__all__ = ["Proof", "Uses", "operations_of_ids", "prove", "prove_honest"]

Uses = Mapping[str, frozenset[str]]
"""Id at L1 to the operations that its check binds."""

_SLOW = (
    "L0/probe-never-raises",
    "L0/spawn",
    "L1/collectives/two-ranks",
    "L1/dispatch/two-ranks",
    "L1/combine/two-ranks",
    "L1/reduce_norm/two-ranks",
    "L1/reduce_norm/scatter",
)
"""Checks that start processes, seconds each: run for the mutants that are assigned to them."""

_CRASH = re.compile(
    r"^[A-Z]\w*(Error|Exception|Interrupt|Expired): |the step that computed this request failed"
    r"|`core serve` (ended|was not)|^rank \d+ ended with .* and no result"
)
"""Reasons that tell of something that raised, hung or did not start, and of no finding."""
_PLACE = re.compile(r"\((\w+\.py):\d+\)")


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a run showed.

    Args:
        name: Of the variant.
        honest: Whether it must pass.
        level: Of a mutant.
        first: Head of the ids of which one must kill a mutant.
        ran: Ids that were run.
        killed_by: Ids that failed with a finding of their own.
        crashed: Ids that failed because something raised, which proves nothing.
        reasons: Id to reason, of what failed.
        problems: What kept the suite from being collected.
        seconds: Time it took.
    """

    name: str
    honest: bool
    level: str = ""
    first: str = ""
    ran: tuple[str, ...]
    killed_by: tuple[str, ...]
    crashed: tuple[str, ...]
    reasons: Mapping[str, str] = field(repr=False)
    problems: tuple[str, ...] = ()
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether the variant ended as it must, for the right reason."""
        if self.honest:
            return bool(self.ran) and not self.killed_by and not self.crashed
        return any(check_id.startswith(self.first) for check_id in self.killed_by)

    def line(self) -> str:
        """One line for people."""
        words = {(True, True): "passed", (True, False): "REJECTED", (False, True): "killed", (False, False): "SURVIVED"}
        by = next((i for i in (*self.killed_by, *self.crashed) if self.honest or i.startswith(self.first)), None)
        by = by or next(iter((*self.killed_by, *self.crashed)), None)
        told = "" if by is None else f" by {by}: {self.reasons[by][:160]}"
        told += "".join(f"; {problem}" for problem in self.problems[:1])
        counts = f"{len(self.killed_by)}/{len(self.ran)}" + (f" ({len(self.crashed)} crashed)" if self.crashed else "")
        return f"{words[self.honest, self.holds]:<9}{self.level:<3} {self.name:<48}{self.seconds:6.1f} s {counts}{told}"


def operations_of_ids() -> tuple[Proof, dict[str, frozenset[str]]]:
    """Runs L1 against the reference: that it passes, and which operations each check binds."""
    begin = time.monotonic()
    target = Target(info=INFO, make=BareBackend, package="core-conformance")
    report = run_suite(target, ["L1"], select=lambda check_id: not check_id.startswith(_SLOW))
    proof = _proof(Honest(name="the reference itself", heads=("L1",)), report, begin)
    return proof, {record.id: frozenset(record.kinds) for record in report.records}


def prove(mutant: Mutant, uses: Uses | None = None, *, whole: bool = True) -> Proof:
    """Runs the ids that may see the bug.

    Args:
        mutant: The mutant.
        uses: For mutants with kernels at L1; without it the ids under the mutant's `first` alone are run.
        whole: Run all of them; otherwise those under `first` come first and the first failure ends the run.
    """
    begin = time.monotonic()
    chosen = _chooser(mutant, uses)
    with mutant.bug():
        report = run_suite(
            mutant.target(),
            [mutant.level],
            select=chosen,
            stop_at_first=not whole,
            order=lambda check_id: not check_id.startswith(mutant.first),
        )
    return _proof(mutant, report, begin)


def prove_honest(honest: Honest, uses: Uses | None = None) -> Proof:
    """Runs every id that the variant must pass."""
    begin = time.monotonic()

    def chosen(check_id: str) -> bool:
        if not check_id.startswith(honest.heads) or check_id.startswith(_SLOW):
            return False
        return level_of(check_id) != "L1" or not honest.makers or _uses(check_id, honest, uses)

    levels = sorted({level_of(head) for head in honest.heads})
    with honest.bug():
        report = run_suite(honest.target(), levels, select=chosen)
    return _proof(honest, report, begin)


def _uses(check_id: str, variant: Variant, uses: Uses | None) -> bool:
    """Whether the check binds one of the variant's operations, as far as that is known."""
    return uses is None or bool(uses.get(check_id, frozenset()) & variant.makers.keys())


def _chooser(mutant: Mutant, uses: Uses | None) -> Callable[[str], bool]:
    heads = (mutant.first, *mutant.also)
    wide = mutant.backend is not None and not mutant.also

    def chosen(check_id: str) -> bool:
        if check_id.startswith(_SLOW) and not mutant.first.startswith(_SLOW):
            return False
        if check_id.startswith(heads):
            return True
        if mutant.level == "L1" and mutant.makers and uses is not None:
            return _uses(check_id, mutant, uses)
        return wide

    return chosen


def _proof(variant: Variant, report: Report, begin: float) -> Proof:
    ran = [record for record in report.records if record.outcome not in (Outcome.NOT_RUN, Outcome.ERROR)]
    failed = [record for record in ran if not record.outcome.acceptable]
    killers = [record.id for record in failed if not _crashed(record)]
    mutant = variant if isinstance(variant, Mutant) else None
    return Proof(
        name=variant.name,
        honest=mutant is None,
        level="" if mutant is None else mutant.level,
        first="" if mutant is None else mutant.first,
        ran=tuple(record.id for record in ran),
        killed_by=tuple(killers),
        crashed=tuple(record.id for record in failed if _crashed(record)),
        reasons={record.id: record.reason for record in failed},
        problems=tuple(report.problems),
        seconds=time.monotonic() - begin,
    )


def _crashed(record: Record) -> bool:
    """Whether the check ended by an exception that is no finding, or by an assertion that is not the suite's."""
    if _CRASH.search(record.reason):
        return True
    places: list[str] = _PLACE.findall(record.reason)
    return bool(places) and places[-1] not in _SUITE_FILES


_PACKAGE = Path(__file__).parents[1]
_SUITE_FILES = {path.name for path in _PACKAGE.rglob("*.py") if "mutants" not in path.relative_to(_PACKAGE).parts}
