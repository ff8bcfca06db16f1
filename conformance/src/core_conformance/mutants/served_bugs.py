"""Servers with one bug each, from `core_conformance.mutants.serve`, which runs them."""

from __future__ import annotations

import sys

from core_conformance.mutants import serve
from core_conformance.mutants.variant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(
        name=name,
        level="L4",
        first=f"L4/{bug.first}",
        also=tuple(f"L4/{head}" for head in bug.also),
        served=(sys.executable, "-m", serve.__name__, name),
    )
    for name, bug in serve.BUGS.items()
)
