"""`python -m core_conformance.mutants [WORD ...]`; exit code 1 where a mutant survives or an honest variant fails.

--quick         stop each mutant at its first failure
--jobs N        processes (2)
--matrix FILE   run everything and write the kill matrix there
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

from core_conformance.must_pass_lists import LEVELS, must_pass
from core_conformance.mutants.catalogue import HONEST, MUTANTS
from core_conformance.mutants.kill_matrix import render
from core_conformance.mutants.proof import Proof, Uses, operations_of_ids, prove, prove_honest

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs every variant whose name holds one of the words; 1 where one of them has the wrong end."""
    asked = _parser().parse_args(arguments)
    words = [] if asked.matrix else asked.words
    names = [v.name for v in (*MUTANTS, *HONEST) if not words or any(word in v.name for word in words)]
    if not names:
        sys.stdout.write(f"no mutant and no honest variant is called {' or '.join(words)}; without words all are run\n")
        return 2
    proofs = []
    for proof in _run(names, asked.jobs, asked.quick):
        proofs.append(proof)
        sys.stdout.write(proof.line() + "\n")
        sys.stdout.flush()
    wrong = [proof.name for proof in proofs if not proof.holds]
    sys.stdout.write(f"{len(wrong)} of {len(proofs)} ended wrongly{': ' if wrong else ''}{', '.join(wrong)}\n")
    if asked.matrix:
        order = {name: place for place, name in enumerate(names)}
        told = sorted((proof for proof in proofs if proof.name in order), key=lambda proof: order[proof.name])
        Path(asked.matrix).write_text(render(told, must_pass(LEVELS)), encoding="utf-8")
    return int(bool(wrong))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core_conformance.mutants", description="The suite's own proof.")
    parser.add_argument("words", nargs="*", help="run the mutants and honest variants whose name holds one of these")
    parser.add_argument("--quick", action="store_true", help="stop each mutant at its first failure")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--matrix", metavar="FILE", help="run everything, and write the kill matrix there")
    return parser


def _run(names: Sequence[str], jobs: int, quick: bool) -> Iterator[Proof]:
    """Proofs as they are made. What must know which checks bind which operations comes when that is known."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
