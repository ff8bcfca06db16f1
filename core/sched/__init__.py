"""Scheduling, without torch."""

from __future__ import annotations

from core.sched.output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from core.sched.scheduler import Scheduler

__all__ = ["ModelRunnerOutput", "NewRequest", "ScheduledRequest", "Scheduler", "SchedulerOutput"]
