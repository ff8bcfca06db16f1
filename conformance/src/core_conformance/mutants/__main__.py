"""`python -m core_conformance.mutants [NAME ...]`: the kill matrix; exit code 1 where a mutant survives."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from core_conformance.mutants.backend import mutant_target
from core_conformance.mutants.catalogue import HONEST, MUTANTS, Mutant
from core_conformance.run import Report, run_suite

__all__ = ["main", "run_mutant"]


def run_mutant(mutant: Mutant, *, honest: bool = False) -> Report:
    """Runs its level against it: to the first failure for a mutant, all ids of its operation for an honest variant.

    What an honest variant does not do itself is the reference, which the ids of other operations say nothing new of.
    """
    target = mutant_target(mutant.makers)

    def foremost(check_id: str) -> bool:
        return check_id.startswith(mutant.first)

    with mutant.bug():
        if honest:
            return run_suite(target, [mutant.level], select=foremost)
        return run_suite(target, [mutant.level], stop_at_first=True, order=lambda check_id: not foremost(check_id))


def main(names: Sequence[str]) -> int:
    """Runs every mutant and honest variant whose name holds one of the words; 1 where one of them has the wrong end."""
    wrong = 0
    for honest, mutants in ((False, MUTANTS), (True, HONEST)):
        for mutant in mutants:
            if names and not any(name in mutant.name for name in names):
                continue
            begin = time.monotonic()
            report = run_mutant(mutant, honest=honest)
            wrong += report.ok is not honest
            _show(mutant, report, honest, time.monotonic() - begin)
    sys.stdout.write(f"{wrong} of {len(MUTANTS)} mutants and {len(HONEST)} honest variants ended wrongly\n")
    return int(bool(wrong))


def _show(mutant: Mutant, report: Report, honest: bool, seconds: float) -> None:
    if honest:
        verdict = "passed" if report.ok else "REJECTED"
    else:
        verdict = "SURVIVED" if report.ok else "killed"
    first = report.failures[0] if report.failures else None
    by = "" if first is None else f" by {first.id}: {first.reason[:160]}"
    sys.stdout.write(f"{verdict:<9} {mutant.level} {mutant.name:<40} {seconds:5.1f} s{by}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
