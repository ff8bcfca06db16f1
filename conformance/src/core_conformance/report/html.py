"""The matrix as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jinja2

from core_conformance.report.document import count_outcomes
from core_conformance.report.matrix import WORDS, Matrix
from core_conformance.report.trend import Trend

__all__ = ["to_html"]


def to_html(matrix: Matrix, trends: Sequence[Trend] = ()) -> str:
    """The page."""
    return _template().render(matrix=matrix, trends=trends, words=WORDS, count_outcomes=count_outcomes)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("matrix.html")
