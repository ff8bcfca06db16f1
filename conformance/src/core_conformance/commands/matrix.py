"""`core conformance matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from core_conformance.commands.selection import Level

__all__ = ["matrix"]


def matrix(
    format_: Annotated[
        Literal["github", "json", "markdown"],
        typer.Option("--format", help="github: lines for $GITHUB_OUTPUT; json; or a table in Markdown."),
    ] = "markdown",
    since: Annotated[
        str, typer.Option("--since", metavar="REV", help="Only jobs that a change since this revision concerns.")
    ] = "",
    backend: Annotated[list[str] | None, typer.Option("--backend", help="Only this backend; repeatable.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="Only this model; repeatable.")] = None,
    level: Annotated[Level | None, typer.Option("--level", help="At most this level.")] = None,
    shards: Annotated[int, typer.Option("--shards", help="Jobs for each row; 0 takes runners.toml's.")] = 0,
    package: Annotated[str, typer.Option("--package", help="What the jobs install, in place of runners.toml's.")] = "",
    labels: Annotated[
        str, typer.Option("--labels", help="Runner labels between commas; makes a runner of an unknown --backend.")
    ] = "",
) -> None:
    """Print the jobs that show every model on every machine of models.toml and runners.toml."""
    from core.errors import ConfigError
    from core_conformance.matrix import (
        FORMATS,
        Wanted,
        changed_files,
        expand,
        read_tables,
        repository_root,
        touched,
        with_wanted,
    )

    here = Path.cwd()
    root = repository_root(here)
    wanted = Wanted(
        backends=tuple(backend or ()),
        models=tuple(model or ()),
        level=level or "",
        shards=shards,
        package=package,
        labels=tuple(part.strip() for part in labels.split(",") if part.strip()),
    )
    everything = read_tables(root or here)
    jobs = expand(with_wanted(everything, wanted))
    if since:
        if root is None:
            raise ConfigError(f"--since needs a git repository and {here} is in none; leave it out, or change folder")
        jobs = touched(jobs, changed_files(root, since), everything)
    typer.echo(FORMATS[format_](jobs))
