"""A progress bar for loading weights, on standard error where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["load_progress"]


@contextmanager
def load_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that is told bytes done and bytes in all; the bar is gone when the block ends.

    The engine's process shows it: only there is known how far loading is.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"loading {label}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
