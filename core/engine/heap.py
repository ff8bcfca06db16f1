"""Memory of the C library's heap that nobody uses any more, back to the system."""

from __future__ import annotations

import ctypes

__all__ = ["release_heap"]


def release_heap() -> None:
    """Gives back what loading has left behind; no effect where the C library has no `malloc_trim`.

    Reading a vocabulary or packing weights makes and drops many times what stays; glibc keeps such memory for later.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return
