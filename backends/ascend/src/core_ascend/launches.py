"""Which host lists a captured step launches its attention calls with, so that a replay can hand over new ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["HostLists", "note", "recorded"]

HostLists = Callable[[], dict[str, list[int]]]
"""Gives the lists of one call as the plans of the step hold them now, by the names of the call's arguments."""


class _Log(threading.local):
    calls: list[HostLists] | None = None


_log = _Log()


@contextmanager
def recorded() -> Iterator[list[HostLists]]:
    """Collects the calls of this thread, in their order, while a step is captured."""
    calls: list[HostLists] = []
    _log.calls = calls
    try:
        yield calls
    finally:
        _log.calls = None


def note(lists: HostLists) -> None:
    """Tells of a call that takes host lists; forgotten where nothing is captured."""
    if _log.calls is not None:
        _log.calls.append(lists)
