"""`core conformance verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["verify"]


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A certificate, plain or in a DSSE envelope.")],
    report: Annotated[
        Path | None, typer.Option("--report", help="Its report.json; beside the certificate by default.")
    ] = None,
) -> None:
    """Check a certificate again, against its report and what is installed here. Exit code 1: it does not hold."""
    from core_conformance.report.verify import Verdict, verify_certificate

    findings = verify_certificate(file, report)
    for finding in findings:
        typer.echo(f"{finding.verdict:<11} {finding.text}")
    raise typer.Exit(int(any(finding.verdict is Verdict.FAIL for finding in findings)))
