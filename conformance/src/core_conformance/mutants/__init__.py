"""The suite's own proof: backends and engines with one bug each must fail, honest ones that differ must pass."""

from __future__ import annotations

from core_conformance.mutants.catalogue import HONEST, MUTANTS
from core_conformance.mutants.variant import Honest, Mutant

__all__ = ["HONEST", "MUTANTS", "Honest", "Mutant"]
