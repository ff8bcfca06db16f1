"""`core conformance merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["merge"]


def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="report.json of every shard.")],
    out: Annotated[Path, typer.Option("--out", help="Where the one report is written.")],
) -> None:
    """Make one report of those of every shard. Exit code 0: all that ran is acceptable; 1: something is not."""
    from core_conformance.merging import merge_reports
    from core_conformance.report.document import read_report
    from core_conformance.report.files import write_file

    merged = merge_reports([read_report(path) for path in reports], [str(path) for path in reports])
    write_file(out, merged.to_json())
    typer.echo(merged.summary())
    raise typer.Exit(0 if merged.ok else 1)
