"""`python -m core_conformance.flaky`: L3 again and again, each time with other chance; exit code 1 where an id ends in
two ways, or badly.

--backend NAME  which backend; repeatable (cpu and sim)
--times N       repeats of each (20)
--first N       number of the first (0), so that a run can be gone on with
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from core_conformance.engines.chance import CHANCE_VARIABLE
from core_conformance.records import Outcome

__all__ = ["Repeats", "main"]


class Repeats:
    """Outcomes of the ids of one backend over several runs."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._reasons: dict[str, str] = {}
        self._num_runs = 0

    def add(self, outcomes: Mapping[str, tuple[str, str]]) -> None:
        """One run.

        Args:
            outcomes: Id to outcome and reason.
        """
        self._num_runs += 1
        for check_id, (outcome, reason) in outcomes.items():
            self._counts.setdefault(check_id, Counter())[outcome] += 1
            if not Outcome(outcome).acceptable:
                self._reasons[check_id] = reason

    def findings(self) -> list[str]:
        """One line for each id that ended in two ways, was missing in a run, or ended badly."""
        found = []
        for check_id, counts in sorted(self._counts.items()):
            if sum(counts.values()) < self._num_runs:
                counts = counts + Counter(missing=self._num_runs - sum(counts.values()))
            if len(counts) > 1 or check_id in self._reasons:
                told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
                found.append(f"{check_id}: {told}; {self._reasons.get(check_id, '')}".rstrip("; "))
        return found

    def summary(self) -> str:
        """Ids, runs, and how many have more than one outcome."""
        flaky = sum(len(counts) > 1 or sum(counts.values()) < self._num_runs for counts in self._counts.values())
        return f"{flaky} of {len(self._counts)} ids end in two ways in {self._num_runs} runs"


def main(arguments: Sequence[str]) -> int:
    """Runs the repeats of each backend; 1 where there is a finding."""
    asked = _parser().parse_args(arguments)
    bad = False
    for backend in asked.backend or ["cpu", "sim"]:
        repeats = Repeats()
        for chance in range(asked.first, asked.first + asked.times):
            start = time.monotonic()
            outcomes = _run(backend, chance)
            repeats.add(outcomes)
            counts = Counter(outcome for outcome, _ in outcomes.values())
            told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
            _say(f"{backend}, chance {chance}: {told or 'nothing ran'}; {time.monotonic() - start:.0f} s")
            bad |= not outcomes
        findings = repeats.findings()
        for line in findings:
            _say(f"{backend} {line}")
        _say(f"{backend}: {repeats.summary()}")
        bad |= bool(findings)
    return int(bad)


def _run(backend: str, chance: int) -> dict[str, tuple[str, str]]:
    """L3 in a process of its own; hashes of strings differ from run to run too."""
    environment = {**os.environ, CHANCE_VARIABLE: str(chance), "PYTHONHASHSEED": str(chance + 1)}
    with tempfile.TemporaryDirectory(prefix="core-conformance-") as folder:
        command = [sys.executable, "-m", "core.cli", "conformance", "run", "--backend", backend, "--level", "L3"]
        done = subprocess.run(
            [*command, "-k", "L3/*", "--report-dir", folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        report = Path(folder) / "report.json"
        if not report.is_file():
            _say((done.stderr or done.stdout).strip())
            return {}
        records = json.loads(report.read_text(encoding="utf-8"))["records"]
    return {r["id"]: (r["outcome"], r["reason"]) for r in records if r["outcome"] != Outcome.NOT_RUN}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core_conformance.flaky", description="L3, again and again.")
    parser.add_argument("--backend", action="append", metavar="NAME", help="which backend; repeatable (cpu and sim)")
    parser.add_argument("--times", type=int, default=20, help="repeats of each (20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
