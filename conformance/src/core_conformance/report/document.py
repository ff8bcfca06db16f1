"""`report.json`: what a run says of a backend, written, read back, and judged from its records alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core_conformance.records import Mode, Outcome, Record, level_of
from core_conformance.report.facts import RunFacts
from core_conformance.report.schemas import REPORT_SCHEMA, SCHEMA_VERSION, schema_errors

__all__ = ["SCHEMA_NAME", "Report", "read_report"]

SCHEMA_NAME = "core-conformance-report"


@dataclass
class Report:
    """What a run says of a backend.

    Args:
        facts: What ran, on what, when and from where.
        records: One for each id.
        problems: What kept the suite from being run as it must be.
    """

    facts: RunFacts
    records: list[Record]
    problems: list[str] = field(default_factory=list)

    @property
    def levels(self) -> tuple[str, ...]:
        """Levels asked for."""
        return self.facts.levels

    @property
    def ok(self) -> bool:
        """Whether something ran, and everything that ran ended acceptably."""
        ran = [record for record in self.records if record.ran]
        return bool(ran) and not self.problems and all(record.outcome.acceptable for record in ran)

    @property
    def failures(self) -> list[Record]:
        """Records that ran and are not acceptable."""
        return [record for record in self.records if record.ran and not record.outcome.acceptable]

    def of_level(self, level: str) -> list[Record]:
        """Records of a level."""
        return [record for record in self.records if level_of(record.id) == level]

    def complete(self, level: str) -> bool:
        """Whether every id of the level ended acceptably; ids that were not run make it incomplete."""
        mine = self.of_level(level)
        return bool(mine) and not self.problems and all(record.outcome.acceptable for record in mine)

    @property
    def level_reached(self) -> str:
        """The highest Ln with L0 to Ln complete; empty where L0 is not."""
        reached = ""
        for level in sorted({level_of(record.id) for record in self.records if record.id.startswith("L")}):
            if not self.complete(level) or int(level[1:]) != (int(reached[1:]) + 1 if reached else 0):
                break
            reached = level
        return reached

    def summary(self) -> str:
        """One line a level, then each problem and failure with its reason."""
        lines = [self._level_line(level) for level in self.levels]
        own = [record for record in self.records if record.id.startswith(f"{self.facts.backend}/")]
        if own:
            passed = sum(record.outcome is Outcome.PASS for record in own)
            lines.append(f"{self.facts.backend} further cases of its package: {passed} of {len(own)} PASS")
        lines += [f"ERROR   {problem}" for problem in self.problems]
        lines += [f"{record.outcome:<7} {record.id}: {record.reason}" for record in self.failures]
        return "\n".join(lines)

    def _level_line(self, level: str) -> str:
        mine = self.of_level(level)
        worst = max(((r.ratio, r.id) for r in mine if r.ratio is not None), default=None)
        margin = "" if worst is None else f"; worst err/bound {worst[0]:.2f} ({worst[1]})"
        seconds = sum(record.seconds for record in mine)
        ran = [record for record in mine if record.ran]
        in_part = len(ran) < len(mine) and not self.problems and all(record.outcome.acceptable for record in ran)
        state = "complete" if self.complete(level) else "in part" if in_part else "NOT complete"
        where = f"{self.facts.backend} {level} ({self.facts.mode})"
        return f"{where}: {state}: {count_outcomes(mine) or 'no check'}{margin}; {seconds:.1f} s"

    def to_document(self) -> dict[str, Any]:
        """The content of `report.json`."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "run": self.facts.to_dict(),
            "problems": list(self.problems),
            "records": [record.to_dict() for record in self.records],
        }

    def to_json(self) -> str:
        """The text of `report.json`: keys in order, so that equal reports are equal files."""
        return json.dumps(self.to_document(), sort_keys=True, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Report:
        """The report of `to_document`.

        Raises:
            ConfigError: it is no such document, or of a later version.
        """
        errors = schema_errors(document, REPORT_SCHEMA)
        if errors:
            raise ConfigError(f"this is no conformance report of version {SCHEMA_VERSION}: {errors[0]}; run it again")
        records = [Record.from_dict(record) for record in document["records"]]
        twice = [name for name, count in Counter(record.id for record in records).items() if count > 1]
        if twice:
            raise ConfigError(f"{twice[0]} has more than one record; no run writes such a report: run it again")
        return cls(RunFacts.from_dict(document["run"]), records, list(document["problems"]))


def count_outcomes(records: Sequence[Record]) -> str:
    """ "3 PASS, 1 FAIL": outcomes that occur, in their order."""
    counts = Counter(record.outcome for record in records)
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])


def weakest_mode(records: Sequence[Record], default: Mode) -> Mode:
    """The weakest evidence among records that ran: what all of them together may be called."""
    return min((record.mode for record in records if record.ran), key=lambda mode: mode.rank, default=default)


def read_report(path: Path) -> Report:
    """The report in a file.

    Raises:
        ConfigError: it cannot be read, or is no report.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"report {path} cannot be read ({error}); give a report.json that a run has written"
        ) from error
    try:
        return Report.from_document(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
