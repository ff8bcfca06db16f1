"""How an AsyncEngine is, and when it may start a dead engine process again."""

from __future__ import annotations

import enum
import time
from collections import deque
from dataclasses import dataclass, field

__all__ = ["EngineEvent", "EngineHealth", "HealthState", "RestartPolicy"]


class HealthState(enum.StrEnum):
    """Whether requests are taken now, may be taken soon, or never will be again."""

    HEALTHY = "healthy"
    UNRESPONSIVE = "unresponsive"
    RESTARTING = "restarting"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """State, and why it is not healthy."""

    state: HealthState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """Something for an operator's log.

    Args:
        kind: "started", "died", "restarted", "restart_failed" or "gave_up".
        message: The same with its reason, for people.
    """

    kind: str
    message: str


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Delays that double, and a bound on restarts within a window, so that a crash loop ends.

    Args:
        max_restarts: Attempts within `window_s`, failed ones included.
        window_s: Seconds after which an attempt is forgotten.
        first_delay_s: Seconds before the first attempt; doubles with each further one in the window.
        max_delay_s: Bound of the delay.
        silence_limit_s: Seconds without a sign of life after which a process counts as unresponsive.
        kill_silent_after_s: Seconds without one after which it is killed, and started again as if it had died.
    """

    max_restarts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    silence_limit_s: float = 30.0
    kill_silent_after_s: float = 120.0
    _attempts: deque[float] = field(default_factory=deque, repr=False)

    def next_delay_s(self) -> float | None:
        """Seconds to wait before one more attempt, which counts from now; None where there were too many."""
        now = time.monotonic()
        while self._attempts and now - self._attempts[0] > self.window_s:
            self._attempts.popleft()
        if len(self._attempts) >= self.max_restarts:
            return None
        self._attempts.append(now)
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (len(self._attempts) - 1))
