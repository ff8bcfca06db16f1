"""Runs variants, several at a time in processes of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from core_conformance.mutants.catalogue import HONEST, MUTANTS
from core_conformance.mutants.proof import Proof, Uses, operations_of_ids, prove, prove_honest

__all__ = ["run"]


def run(names: Sequence[str], jobs: int, *, quick: bool) -> Iterator[Proof]:
    """Proofs of these variants as they are made. What must know which checks bind which operations comes last.

    Args:
        names: Of mutants and honest variants.
        jobs: Processes; with 1 all is done in this one.
        quick: Whether a mutant's first failure ends its run.
    """
    late = [] if quick else [name for name in names if _needs_uses(name)]
    early = [name for name in names if name not in late]
    if jobs > 1:
        yield from _run_apart(early, late, jobs, quick)
        return
    yield from (_prove(name, None, quick) for name in early)
    if late:
        reference, uses = operations_of_ids()
        yield reference
        yield from (_prove(name, uses, quick) for name in late)


def _run_apart(early: Sequence[str], late: Sequence[str], jobs: int, quick: bool) -> Iterator[Proof]:
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=spawned) as pool:
        known = pool.submit(operations_of_ids) if late else None
        running: list[Future[Proof]] = [pool.submit(_prove, name, None, quick) for name in early]
        if known is not None:
            reference, uses = known.result()
            yield reference
            running += [pool.submit(_prove, name, uses, quick) for name in late]
        for done in as_completed(running):
            yield done.result()


def _needs_uses(name: str) -> bool:
    """Whether only some ids of L1 can see the variant."""
    mutant = next((mutant for mutant in MUTANTS if mutant.name == name), None)
    if mutant is not None:
        return mutant.level == "L1" and bool(mutant.makers)
    honest = next(honest for honest in HONEST if honest.name == name)
    return bool(honest.makers)


def _prove(name: str, uses: Uses | None, quick: bool) -> Proof:
    mutant = next((mutant for mutant in MUTANTS if mutant.name == name), None)
    if mutant is not None:
        return prove(mutant, uses, whole=not quick)
    return prove_honest(next(honest for honest in HONEST if honest.name == name), uses)
