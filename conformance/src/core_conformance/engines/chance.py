"""What is random in the schedules of a run: one number, so that a run can be had again, and others can be tried."""

from __future__ import annotations

import os

__all__ = ["CHANCE_VARIABLE", "chance_seed"]

CHANCE_VARIABLE = "CORE_CONFORMANCE_CHANCE"
"""Environment variable with that number; arrivals, aborts, budgets and random drafts of L3 follow from it. No prompt
and no expected token does."""


def chance_seed() -> int:
    """The number of this run; 0 where none is set."""
    return int(os.environ.get(CHANCE_VARIABLE) or 0)
