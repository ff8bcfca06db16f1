"""`core conformance`: run the suite against an installed backend, and read what came of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from core.errors import CoreError
from core_conformance.commands.list import list_
from core_conformance.commands.matrix import matrix
from core_conformance.commands.merge import merge
from core_conformance.commands.next import next_
from core_conformance.commands.report import report
from core_conformance.commands.run import run
from core_conformance.commands.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="conformance",
    help="Show that a backend does what the contract says, level by level.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# One line a command; the module of each lies in core_conformance.commands and imports torch only when it is called.
app.command("run")(run)
app.command("list")(list_)
app.command("next")(next_)
app.command("report")(report)
app.command("verify")(verify)
app.command("matrix")(matrix)
app.command("merge")(merge)


def main(args: Sequence[str]) -> None:
    """Runs `core conformance ARGS`; a CoreError is one line on standard error and its exit code."""
    try:
        app(list(args), prog_name="core conformance")
    except CoreError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
