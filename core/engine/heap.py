"""What loading leaves in memory: freed pieces back to the system, and objects that stay out of the collector's way."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

__all__ = ["collections_paused", "keep_heap", "release_heap"]


def release_heap() -> None:
    """Gives back what loading has left behind; no effect where the C library has no `malloc_trim`.

    Reading a vocabulary or packing weights makes and drops many times what stays; glibc keeps such memory for later.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """No collection of cyclic garbage inside the block: imports make 200,000 objects that all stay, and each collection
    would look through them anew."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def keep_heap() -> None:
    """Collections start, and never look at what is there now: a full one of a process with torch takes 0.1 s, which
    every stream would wait for. For a process of the engine's own: garbage of this moment stays too."""
    gc.freeze()
    gc.enable()
