"""Options that say which checks are meant, the same words in every command."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Annotated, Literal

import typer

__all__ = ["AnyLevel", "Level", "selector"]

Level = Literal["L0", "L1", "L2", "L3", "L4"]
AnyLevel = Annotated[Level, typer.Option("--level", help="Highest level to run.")]


def selector(text: str) -> Callable[[str], bool]:
    """Whether an id holds the text of `-k`, or matches it where it has a `*`."""
    pattern = text if "*" in text else f"*{text}*"
    return lambda check_id: fnmatch.fnmatchcase(check_id, pattern)
