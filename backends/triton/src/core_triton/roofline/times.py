"""Bytes and operations of a call over what a chip can do."""

from __future__ import annotations

from dataclasses import dataclass

from core.backend.ops import OpSpec
from core_triton.roofline.chips import Chip
from core_triton.roofline.costs import Cost, Sizes, cost_of

__all__ = ["Expected", "expected"]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a call would take at best.

    Args:
        cost: Bytes and operations.
        memory_s: Seconds for the bytes.
        matrix_s: Seconds for the operations.
    """

    cost: Cost
    memory_s: float
    matrix_s: float

    @property
    def seconds(self) -> float:
        """The larger of both: they overlap at best."""
        return max(self.memory_s, self.matrix_s)

    @property
    def bound(self) -> str:
        """What limits it: "memory" or "matrix"."""
        return "memory" if self.memory_s >= self.matrix_s else "matrix"

    def share(self, measured_s: float) -> float:
        """The part of the limit that a call of `measured_s` seconds reached; 1 is the limit."""
        return self.seconds / measured_s


def expected(op: OpSpec, sizes: Sizes, chip: Chip) -> Expected:
    """The time of one call of `op` that no program can pass on `chip`.

    Args:
        op: What is done.
        sizes: What is known at run time alone.
        chip: Published or measured figures.
    """
    cost = cost_of(op, sizes)
    return Expected(
        cost=cost, memory_s=cost.bytes_moved / chip.bandwidth, matrix_s=cost.operations / chip.rate(cost.dtype)
    )
