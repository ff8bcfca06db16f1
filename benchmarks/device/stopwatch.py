"""Time of a call on a device, the best of several."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["best_seconds"]

_LEAST_S = 0.01


def best_seconds(work: Callable[[], object], wait: Callable[[], None], *, repeats: int) -> float:
    """Seconds of one call.

    Args:
        work: Enqueues the call.
        wait: Returns when all that was enqueued is done.
        repeats: Measurements of which the best counts; 1 calls once behind a first call that compiles.
    """
    work()
    wait()
    calls, best = 1, float("inf")
    for _ in range(repeats):
        while True:
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            wait()
            spent = time.perf_counter() - begin
            if repeats == 1 or spent >= _LEAST_S:
                break
            calls *= 2
        best = min(best, spent / calls)
    return best
