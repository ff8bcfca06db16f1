"""What a server holds while it does nothing: memory, descriptors, threads, processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import psutil

from core_conformance.served.server import Server
from core_conformance.subject import Mismatch
from core_conformance.tolerance import LEAK_ALLOWANCE

__all__ = ["Footprint", "footprint", "must_not_grow"]

_SETTLE_S = 15.0
"""Patience until closed connections and idle workers are gone."""


@dataclass(frozen=True)
class Footprint:
    """Sums over the server's process and all below it.

    Args:
        memory_bytes: Resident memory.
        descriptors: Open files, sockets and pipes.
        threads: Threads.
        processes: Processes.
    """

    memory_bytes: int
    descriptors: int
    threads: int
    processes: int


def footprint(server: Server) -> Footprint:
    """The server's footprint now."""
    memory, descriptors, threads, processes = 0, 0, 0, 0
    for process in server.family():
        with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
            memory += process.memory_info().rss
            descriptors += process.num_fds()
            threads += process.num_threads()
            processes += 1
    return Footprint(memory, descriptors, threads, processes)


def must_not_grow(
    before: Footprint,
    measure: Callable[[], Footprint],
    *,
    patience_s: float = _SETTLE_S,
) -> tuple[Footprint, str, float]:
    """Measures until nothing is above `before` by more than its allowance, and names the quantity nearest to it.

    Returns:
        The last footprint, the worst quantity and its growth as a share of the allowance.

    Raises:
        Mismatch: a quantity stays above; names it with both values.
    """
    deadline = time.monotonic() + patience_s
    while True:
        after = measure()
        growth = {name: value - asdict(before)[name] for name, value in asdict(after).items()}
        shares = {name: max(growth[name], 0) / allowance for name, allowance in LEAK_ALLOWANCE.items()}
        worst = max(shares, key=lambda name: shares[name])
        if shares[worst] <= 1.0:
            return after, worst, shares[worst]
        if time.monotonic() > deadline:
            raise Mismatch(
                f"{worst} grew from {asdict(before)[worst]} to {asdict(after)[worst]} over the soak, at most "
                f"{LEAK_ALLOWANCE[worst]} more may be held"
            )
        time.sleep(0.25)
