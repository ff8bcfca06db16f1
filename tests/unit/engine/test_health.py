"""A crash loop slows down and ends."""

from __future__ import annotations

import pytest

from core.engine.health import RestartPolicy
from core.engine.pulse import STEP_LIMIT_S, Pulse


def test_delays_double_up_to_a_bound_and_end() -> None:
    policy = RestartPolicy(max_restarts=4, first_delay_s=1.0, max_delay_s=3.0)
    assert [policy.next_delay_s() for _ in range(5)] == [1.0, 2.0, 3.0, 3.0, None]


def test_attempts_are_forgotten_after_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("core.engine.health.time.monotonic", lambda: now[0])
    policy = RestartPolicy(max_restarts=1, window_s=10.0, first_delay_s=1.0)
    assert policy.next_delay_s() == 1.0
    assert policy.next_delay_s() is None
    now[0] = 11.0
    assert policy.next_delay_s() == 1.0


def test_silence_and_steps_without_an_end_are_problems() -> None:
    pulse = Pulse(3.0)
    pulse.wait(2.9)
    assert pulse.problem is None
    pulse.wait(0.1)
    assert "no sign of life for 3 s" in str(pulse.problem)
    pulse.news(STEP_LIMIT_S)
    assert "has not ended" in str(pulse.problem)
    pulse.news()
    assert pulse.problem is None
