"""The scheduler's idea of what a small step pays for is that of the runner."""

from __future__ import annotations

from core.exec.step_graphs import padded_size
from core.sched.step_sizes import paid_size


def test_a_step_pays_for_the_recorded_step_that_runs_it() -> None:
    for num_rows in range(1, 257):
        assert paid_size(num_rows) == padded_size(num_rows, 512)
