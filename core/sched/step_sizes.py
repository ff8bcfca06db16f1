"""Sizes of small steps, and what steps of each size took: a recorded step costs as much as its size, filled or not."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

__all__ = ["LARGEST_SIZE", "StepSizes", "filled_size", "paid_size"]

LARGEST_SIZE = 64
"""Rows of the largest step that is looked at by its size; above it a piece more or less hardly counts."""
_NUM_SAMPLES = 15
_MIN_SAMPLES = 3
"""Of fewer nothing is concluded: the first step of a size is slow where it is recorded."""
_FORGET_AFTER = 1000
"""Steps after which a size that was not used is tried again: it may have been slow for a reason that is gone."""


def paid_size(num_rows: int) -> int:
    """Rows that a step pays for which has `num_rows`: sizes are 0, 1, 2, 4, 8, and multiples of 8.

    Recorded steps are made in these sizes (`core.exec.step_graphs`), and kernels work by such pieces.
    """
    return -(-num_rows // 8) * 8 if num_rows > 8 else num_rows and 1 << (num_rows - 1).bit_length()


def filled_size(num_rows: int) -> int:
    """The largest of these sizes that is not above `num_rows`."""
    return num_rows // 8 * 8 if num_rows >= 8 else num_rows and 1 << (num_rows.bit_length() - 1)


@dataclass(slots=True)
class _Ratios:
    """How many times as long as a quiet one the last steps of a size took."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SAMPLES))
    median: float = 0.0
    last_step: int = 0


class StepSizes:
    """Remembers steps with prompts by the size of their requests that generate and the size of all of it."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int], _Ratios] = {}
        self._num_steps = 0

    def observe(self, num_decodes: int, num_tokens: int, ratio: float) -> None:
        """Takes note of a step that took `ratio` times what it takes without its prompts."""
        self._num_steps += 1
        size = paid_size(num_decodes + num_tokens)
        if size > LARGEST_SIZE:
            return
        found = self._ratios.setdefault((paid_size(num_decodes), size), _Ratios())
        if self._num_steps - found.last_step > _FORGET_AFTER:
            found.values.clear()  # else a first new step would bring the old ones back
        found.values.append(ratio)
        found.median = statistics.median(found.values)
        found.last_step = self._num_steps

    def ratio(self, num_decodes: int, size: int) -> float | None:
        """The median of the last steps of a size; None where too few were seen."""
        found = self._ratios.get((paid_size(num_decodes), size))
        if found is None or len(found.values) < _MIN_SAMPLES or self._num_steps - found.last_step > _FORGET_AFTER:
            return None
        return found.median

    def fitting(self, num_decodes: int, size: int, most: float) -> int:
        """`size`, made smaller while it took more than `most` times as long, or larger while that should fit too.

        What a size costs beside the quiet step is taken to grow with its rows until it was measured.
        """
        quiet = paid_size(num_decodes)
        while size > quiet and (self.ratio(num_decodes, size) or 0.0) > most:
            size = filled_size(size - 1)
        while size < LARGEST_SIZE:
            known, larger = self.ratio(num_decodes, size), paid_size(size + 1)
            if known is None or size <= quiet:
                return size
            guess = 1.0 + (known - 1.0) * (larger - quiet) / (size - quiet)
            measured = self.ratio(num_decodes, larger)
            if (guess if measured is None else measured) > most:
                return size
            size = larger
        return size
