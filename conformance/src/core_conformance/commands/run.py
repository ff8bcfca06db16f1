"""`core conformance run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from core_conformance.commands.selection import AnyLevel, selector
from core_conformance.records import Outcome, Record

__all__ = ["run"]


def run(
    backend: Annotated[str, typer.Option("--backend", help="NAME or NAME:INDEX; `reference` is the core's own torch.")],
    level: AnyLevel = "L3",
    report: Annotated[
        Path | None, typer.Option("--report", help="Write records to this file, one JSON a line.")
    ] = None,
    k: Annotated[str, typer.Option("-k", help="Run only ids that hold this text, or match it where it has a *.")] = "",
    waivers: Annotated[Path | None, typer.Option("--waivers", help="TOML file of waivers.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Write each check as it ends.")] = False,
    write_must_pass: Annotated[
        bool,
        typer.Option("--write-must-pass", help="Replace the committed lists by the ids of the files; run nothing."),
    ] = False,
) -> None:
    """Run every check up to a level. Exit code 0: all that ran is acceptable; 1: something is not."""
    from core.plugins import list_conformance_cases
    from core_conformance.must_pass_lists import levels_up_to
    from core_conformance.run import run_suite
    from core_conformance.target import load_target
    from core_conformance.vendor_cases import run_vendor_cases
    from core_conformance.waivers import read_waivers

    target = load_target(backend)
    result = run_suite(
        target,
        levels_up_to(level),
        select=selector(k),
        progress=_show if verbose else lambda record: None,
        waivers=read_waivers(waivers) if waivers else (),
        write_lists=write_must_pass,
    )
    if write_must_pass:
        typer.echo(f"lists of {', '.join(result.levels)} are written")
        raise typer.Exit(0)
    result.records += run_vendor_cases(target, list_conformance_cases(target.name), select=selector(k))
    target.close()
    if report is not None:
        report.write_text("".join(f"{line}\n" for line in result.to_lines()), encoding="utf-8")
    typer.echo(result.summary())
    raise typer.Exit(0 if result.ok else 1)


def _show(record: Record) -> None:
    if record.outcome is not Outcome.NOT_RUN:
        ratio = "" if record.ratio is None else f" err/bound {record.ratio:.2f}"
        typer.echo(f"{record.outcome:<11} {record.id}{ratio} {record.seconds:.2f} s")
