"""`python -m core_conformance.mutants [WORD ...]`; exit code 1 where a mutant survives or an honest variant fails.

--quick         stop each mutant at its first failure
--jobs N        processes (2)
--matrix FILE   run everything and write the kill matrix there
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from core_conformance.must_pass_lists import LEVELS, must_pass
from core_conformance.mutants.catalogue import HONEST, MUTANTS
from core_conformance.mutants.kill_matrix import render
from core_conformance.mutants.pool import run

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
    for proof in run(names, asked.jobs, quick=asked.quick):
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
