"""How many prompt tokens a step may hold beside requests that generate, so that their tokens keep coming."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from core.sched.output import SchedulerOutput
from core.sched.step_costs import StepCosts, StepLoad
from core.sched.step_sizes import LARGEST_SIZE, filled_size, paid_size

__all__ = ["SHORT_PROMPT", "ChunkBound"]

SHORT_PROMPT = 64
"""Prompts with no more tokens to compute may join a step whole, in one step of LENIENT_EVERY."""
LENIENT_EVERY = 200
"""One long step among so many leaves the 99th percentile of the others alone, and saves a burst of short prompts (a
new turn of many conversations, whose past is cached) from being served one by one."""
_MIN_TOKENS = 4
"""What prompts get in any case, so that they end. Two share it: one token alone would pass for a request that
generates."""
_MARGIN = 0.9
"""Part of the stretch that is planned for; the rest is for what the model does not know."""


class ChunkBound:
    """Times every step and bounds the prompts of the next one by what they would cost.

    Args:
        stretch: How many times as long as without prompts a step may take, above 1.
        timer: Seconds, from anywhere.
    """

    def __init__(self, stretch: float, timer: Callable[[], float]) -> None:
        self._extra = max(_MARGIN * stretch - 1.0, 0.1)
        self._timer = timer
        self._costs = StepCosts()
        self._in_flight: deque[tuple[int, StepLoad, float]] = deque()
        self._ended = float("-inf")
        self._num_since_long = LENIENT_EVERY

    @property
    def lenient(self) -> bool:
        """Whether short prompts may join the next step whole."""
        return self._num_since_long >= LENIENT_EVERY

    def num_tokens(self, num_decodes: int, start: int) -> int | None:
        """Prompt tokens that may join a step of `num_decodes` requests with one token each; None for any number.

        Args:
            start: Tokens that the first prompt has behind it already.
        """
        quiet = self._costs.quiet_s(num_decodes) if num_decodes else None
        if quiet is None:
            return None  # nobody waits for the step, or nothing was measured yet
        num_paid = self._costs.num_tokens_within(self._extra * quiet, start)
        if num_paid is None:
            return None
        # All of a size costs what its first row does: it is filled, or not begun.
        size = filled_size(paid_size(num_decodes) + num_paid)
        if size <= LARGEST_SIZE:
            size = self._costs.sizes.fitting(num_decodes, size, 1.0 + self._extra)
        num_tokens = size - num_decodes
        return num_tokens if num_tokens >= _MIN_TOKENS else paid_size(num_decodes + _MIN_TOKENS) - num_decodes

    def scheduled(self, output: SchedulerOutput, bound: int | None) -> None:
        """Takes note of a step that is about to be submitted, and of the bound that it was given."""
        load = _load(output)
        self._in_flight.append((output.step_id, load, self._timer()))
        if bound is not None and load.num_tokens > bound:
            self._num_since_long = 0
        elif load.num_decodes:
            self._num_since_long += 1

    def reported(self, output: SchedulerOutput) -> None:
        """Learns from a step whose result is there. Steps before it that were never reported are forgotten."""
        now = self._timer()
        while self._in_flight and self._in_flight[0][0] <= output.step_id:
            step_id, load, began = self._in_flight.popleft()
            if step_id == output.step_id:
                self._costs.observe(load, now - max(began, self._ended))
        self._ended = now


def _load(output: SchedulerOutput) -> StepLoad:
    """Requests with one token come first in a step, so the prompts are its end."""
    num_decodes = len(output.scheduled)
    num_tokens, num_pairs = 0, 0.0
    if output.num_scheduled_tokens > num_decodes:
        for share in reversed(output.scheduled):
            count = share.num_scheduled_tokens
            if count == 1:
                break
            num_decodes -= 1
            num_tokens += count
            num_pairs += count * (share.num_computed_tokens + count / 2)
    return StepLoad(num_decodes, num_tokens, num_pairs)
