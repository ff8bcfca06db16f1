"""`core conformance report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="report.json of one or more runs.")],
    html: Annotated[Path | None, typer.Option("--html", help="Write the matrix as one HTML file.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the matrix in Markdown.")] = None,
    badge: Annotated[Path | None, typer.Option("--badge", help="Write the JSON of a shields.io endpoint.")] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")] = None,
    since: Annotated[
        list[Path] | None,
        typer.Option("--since", help="An older report.json of one of the backends: show what changed; repeatable."),
    ] = None,
) -> None:
    """Make a matrix of models by backends from reports. Without an option it is printed in Markdown."""
    from core.errors import ConfigError
    from core_conformance.report.badge import to_badge
    from core_conformance.report.document import read_report
    from core_conformance.report.files import write_file
    from core_conformance.report.html import to_html
    from core_conformance.report.junit import to_junit
    from core_conformance.report.markdown import matrix_markdown
    from core_conformance.report.matrix import build_matrix
    from core_conformance.report.trend import trends_since

    reports = [read_report(path) for path in files]
    olds = [read_report(path) for path in since or ()]
    trends = trends_since(reports, olds)
    if len(trends) < len(olds):
        raise ConfigError(
            "--since names a report whose backend and device none of the reports has; give one of the same"
        )
    matrix = build_matrix(reports)
    if html is not None:
        write_file(html, to_html(matrix, trends))
    if markdown is not None:
        write_file(markdown, matrix_markdown(matrix, trends))
    if badge is not None:
        write_file(badge, to_badge(matrix))
    if junit is not None:
        write_file(junit, to_junit(reports))
    if not any((html, markdown, badge, junit)):
        typer.echo(matrix_markdown(matrix, trends).rstrip())
