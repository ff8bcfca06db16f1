"""`core conformance run`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Literal

import typer

from core_conformance.commands.selection import AnyLevel
from core_conformance.records import Record

__all__ = ["run"]


def run(
    backend: Annotated[str, typer.Option("--backend", help="NAME or NAME:INDEX; `reference` is the core's own torch.")],
    level: AnyLevel = "L3",
    report_dir: Annotated[
        Path | None, typer.Option("--report-dir", help="Write report.json, junit.xml and summary.md to this folder.")
    ] = None,
    certify: Annotated[
        Path | None,
        typer.Option("--certify", help="Write a certificate to this file; only for a whole run of unchanged packages."),
    ] = None,
    k: Annotated[str, typer.Option("-k", help="Run only ids that hold this text, or match it where it has a *.")] = "",
    shard: Annotated[
        str, typer.Option("--shard", metavar="INDEX/COUNT", help="Run one of several parts: all of L0 and its share.")
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="From L2 on, run only this model, the suite's or a checkpoint's; repeatable."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="Type in which checkpoints run.")
    ] = "float32",
    waivers: Annotated[Path | None, typer.Option("--waivers", help="TOML file of waivers.")] = None,
    check_timeout: Annotated[
        float,
        typer.Option(
            "--check-timeout", min=1, max=604_800, help="Seconds that one check may take before it ends the run."
        ),
    ] = 600,
    soak_seconds: Annotated[
        float, typer.Option("--soak-seconds", min=1, help="How long the soak of L4 goes on, after its warm-up.")
    ] = 8,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Write each check as it ends.")] = False,
    write_must_pass: Annotated[
        bool,
        typer.Option("--write-must-pass", help="Replace the committed lists by the ids of the files; run nothing."),
    ] = False,
) -> None:
    """Run every check up to a level. Exit code 0: all that ran is acceptable; 1: something is not."""
    from core_conformance.must_pass_lists import levels_up_to
    from core_conformance.waivers import read_waivers

    levels = levels_up_to(level)
    if write_must_pass:
        _write_lists(backend, levels)
        raise typer.Exit(0)

    from core.errors import ConfigError
    from core_conformance.report.certificate import refuse_before_run, write_certificate
    from core_conformance.report.files import write_report_files
    from core_conformance.sharding import choose
    from core_conformance.supervise import run_supervised

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the run, and what ran is reported
    part = choose(backend, levels, shard=shard, models=model or (), dtype=dtype)
    _check_places(report_dir, certify)
    if certify is not None:
        if shard or model:
            raise ConfigError("--certify needs the whole suite; leave --shard and --model out")
        certify.unlink(missing_ok=True)  # an older one must not be taken for this run's
        refuse_before_run(selection=k)
    report = run_supervised(
        backend,
        levels,
        selection=k,
        skip=part.skip,
        shard=shard,
        models=part.models,
        checkpoints=part.checkpoints,
        soak_seconds=soak_seconds,
        progress=_show if verbose else lambda record: None,
        waivers=read_waivers(waivers) if waivers else (),
        check_timeout_s=check_timeout,
    )
    report.records = [record for record in report.records if record.id not in part.others]
    if not any(record.ran for record in report.records) and not report.problems:
        raise ConfigError(f"-k {k!r} leaves no check over; `core conformance list` has the ids")
    typer.echo(report.summary())
    written = b"" if report_dir is None else write_report_files(report, report_dir)
    if certify is not None:
        typer.echo(write_certificate(report, written, certify))
    raise typer.Exit(0 if report.ok else 1)


def _check_places(report_dir: Path | None, certify: Path | None) -> None:
    """What cannot be written is said now, and not behind an hour of checks."""
    from core.errors import ConfigError

    if report_dir is not None and report_dir.exists() and not report_dir.is_dir():
        raise ConfigError(f"--report-dir {str(report_dir)!r} is a file; give a folder, or a name that is free")
    if certify is not None and report_dir is None:
        raise ConfigError("--certify needs --report-dir: a certificate is about a report; add --report-dir DIR")
    if certify is not None and certify.is_dir():
        raise ConfigError(f"--certify {str(certify)!r} is a folder; give the name of a file")


def _write_lists(backend: str, levels: tuple[str, ...]) -> None:
    from core_conformance.run import run_suite
    from core_conformance.target import load_target

    run_suite(load_target(backend), levels, write_lists=True)
    typer.echo(f"lists of {', '.join(levels)} are written")


def _show(record: Record) -> None:
    if record.ran:
        ratio = "" if record.ratio is None else f" err/bound {record.ratio:.2f}"
        typer.echo(f"{record.outcome:<11} {record.id}{ratio} {record.seconds:.2f} s")
