"""Many compilations in a few processes; one that dies in the compiler's own code takes nothing else with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

__all__ = ["run_pooled"]

J = TypeVar("J", bound=Hashable)
R = TypeVar("R")


def run_pooled(
    work: Sequence[J],
    function: Callable[[J], R],
    *,
    processes: int,
    died: Callable[[J], R],
    told: Callable[[R], None] = lambda _: None,
) -> list[R]:
    """What `function` returns for each job, in the order given.

    Args:
        work: The jobs, each once; they and the results travel between processes.
        function: What is done with each.
        processes: How many at once.
        died: The result of a job whose process dies, twice.
        told: Called with each result as it comes.
    """
    done: dict[J, R] = {}

    def keep(job: J, found: R) -> None:
        done[job] = found
        told(found)

    _pooled(work, function, processes, keep)
    for job in work:
        if job not in done:
            _pooled([job], function, 1, keep)
        if job not in done:
            keep(job, died(job))
    return [done[job] for job in work]


def _pooled(work: Sequence[J], function: Callable[[J], R], processes: int, keep: Callable[[J, R], None]) -> None:
    """Whatever ended before a process died is kept; the rest is the caller's."""
    # A fresh interpreter each: the compilers are full of threads and global state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=processes, mp_context=context) as pool:
        futures = {pool.submit(function, job): job for job in work}
        for future in as_completed(futures):
            try:
                keep(futures[future], future.result())
            except BrokenProcessPool:
                continue
