"""Certificates: an in-toto statement over packages and report on the level of a backend, and when none is given.

Format: in-toto Statement v1 and its test-result predicate v0.1 (in-toto.io). A certificate is unsigned: whoever wants
more than a self-report signs the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core_conformance.records import Mode, Outcome, Record, level_of
from core_conformance.report.document import Report, weakest_mode
from core_conformance.report.files import REPORT_FILE, write_file
from core_conformance.report.judgement import objections
from core_conformance.report.provenance import inspect_package

__all__ = [
    "PREDICATE_TYPE",
    "STATEMENT_TYPE",
    "RefusedError",
    "make_statement",
    "refuse_before_run",
    "write_certificate",
]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"


class RefusedError(ConfigError):
    """No certificate can be given."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("no certificate is given: " + "; ".join(reasons))


def refuse_before_run(*, selection: str) -> None:
    """Refuses what no run can mend, before an hour is spent on it.

    Raises:
        RefusedError: only some ids were asked for; core or suite were edited, or their checkout is dirty.
    """
    reasons = [f"-k {selection!r} leaves checks out; run without it"] if selection else []
    packages = (inspect_package("core-inference", "core"), inspect_package("core-conformance", "core_conformance"))
    reasons += [package.objection for package in packages if package.objection]
    if reasons:
        raise RefusedError(reasons)


def write_certificate(report: Report, content: bytes, path: Path) -> str:
    """Writes the certificate and returns a line that says what it certifies.

    Args:
        report: The report.
        content: `report.json` as it was written.
        path: Where to.

    Raises:
        RefusedError: the report does not carry one; nothing is written.
    """
    reasons = objections(report)
    if reasons:
        path.unlink(missing_ok=True)  # an older one must not be taken for this run's
        raise RefusedError(reasons)
    statement = make_statement(report, content)
    write_file(path, json.dumps(statement, indent=1, sort_keys=True) + "\n")
    facts = report.facts
    return f"certified {facts.backend} {report.level_reached} ({facts.mode}), self-reported until {path.name} is signed"


def make_statement(report: Report, content: bytes) -> dict[str, Any]:
    """The statement of a report without objections.

    Args:
        report: The report.
        content: `report.json` as it was written.
    """
    facts = report.facts
    subject = [
        {
            "name": package.name,
            "digest": {"sha256": package.digest},
            "annotations": {"version": package.version, "source": package.source, "revision": package.revision},
        }
        for package in facts.packages.values()
    ]
    subject.append({"name": REPORT_FILE, "digest": {"sha256": hashlib.sha256(content).hexdigest()}})
    records = [record for record in report.records if level_of(record.id) in facts.levels]
    waived = _ids(records, Outcome.WAIVED)
    return {
        "_type": STATEMENT_TYPE,
        "subject": subject,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": "WARNED" if waived else "PASSED",
            "configuration": [
                {
                    "name": "core-conformance suite",
                    "digest": {"sha256": facts.suite_hash},
                    "annotations": {
                        "level": report.level_reached,
                        "backend": facts.backend,
                        "device": facts.device.arch,
                        "mode": str(weakest_mode(records, Mode(facts.mode))),
                        "contract": facts.contract,
                        "date": facts.date,
                        "unsupported": _ids(records, Outcome.UNSUPPORTED),
                    },
                }
            ],
            # What a backend declares unsupported and refuses has passed its check; `unsupported` tells the two apart.
            "passedTests": _ids(records, Outcome.PASS, Outcome.UNSUPPORTED),
            "warnedTests": waived,
            "failedTests": [],
        },
    }


def _ids(records: Sequence[Record], *outcomes: Outcome) -> list[str]:
    return sorted(record.id for record in records if record.outcome in outcomes)
