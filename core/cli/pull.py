"""`core pull`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from core.loader import hub

__all__ = ["pull_model"]


def pull_model(name: str, revision: str | None) -> None:
    """Fetches the model and prints where it is.

    Raises:
        CoreError: the name is unknown, or its files cannot be fetched.
    """
    with _bytes_bar(name) as update:
        path = hub.pull(name, revision=revision, progress=update)
    sys.stdout.write(f"{path}\n")


@contextmanager
def _bytes_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
