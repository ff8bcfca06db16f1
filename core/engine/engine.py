"""The engine: a Scheduler that decides, a Runner that computes, and one short step between them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from core.engine.protocol import EngineFacts
from core.errors import CoreError, EngineDeadError
from core.exec.runner_api import Runner, RunnerFuture
from core.outputs import EngineOutput, EngineStats
from core.request import EngineRequest
from core.sched.output import ModelRunnerOutput, SchedulerOutput
from core.sched.scheduler import Scheduler

__all__ = ["Engine"]

logger = logging.getLogger("core.engine")


class Engine:
    """Runs requests, token ids in and token ids out. Not safe to use from several threads.

    Args:
        scheduler: Owned by the engine from now on.
        runner: Owned too; `close` closes it.
        facts: What is served, for whoever asks.
        async_scheduling: Whether step n+1 is submitted before the result of step n is awaited, so that the device
            never waits for the host. Stops are then seen one step late.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, facts: EngineFacts, *, async_scheduling: bool) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._depth = 2 if async_scheduling else 1
        self._in_flight: deque[tuple[SchedulerOutput, RunnerFuture]] = deque()
        self.facts = facts
        self.stalled = False
        """Whether the last step found work that it could neither schedule nor collect; polling faster is no use."""

    def step(self) -> list[EngineOutput]:
        """Schedules one step, submits it, and gives the news of the oldest step in flight.

        Gives nothing while the first step of a burst is in flight and a second may be scheduled behind it.

        Raises:
            EngineDeadError: the runner cannot run any more; the engine is of no further use.
        """
        output = self._scheduler.schedule()
        self._submit(output)
        if self._may_run_ahead(output):
            return []
        return self._collect()

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queues all of them, or none.

        Raises:
            QueueFullError: the waiting queue has no room.
            InvalidRequestError: a request can never run in this engine.
        """
        for position, request in enumerate(requests):
            try:
                self._scheduler.add_request(request)
            except CoreError:
                self.abort([earlier.request_id for earlier in requests[:position]])
                raise

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests and gives back their blocks; ids that are unknown or finished are ignored."""
        self._scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._in_flight) or self._scheduler.has_work()

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        return self._scheduler.stats()

    def reset_prefix_cache(self) -> None:
        """Makes sure that no later request reuses what has been computed up to now; running requests go on."""
        self._scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError where the bookkeeping of requests and blocks contradicts itself."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Gives up steps in flight and frees the device. A second call has no effect."""
        self._in_flight.clear()
        self._runner.close()

    def _submit(self, output: SchedulerOutput) -> None:
        if output.empty:
            return
        try:
            future = self._runner.submit(output)
        except EngineDeadError:
            raise
        except Exception as error:
            future = _FailedStep(error)  # told in its turn: the scheduler wants steps in order
        self._in_flight.append((output, future))

    def _may_run_ahead(self, output: SchedulerOutput) -> bool:
        """Whether to prepare one more step before the oldest is awaited."""
        self.stalled = output.empty and not self._in_flight
        return not output.empty and len(self._in_flight) < self._depth

    def _collect(self) -> list[EngineOutput]:
        """The news of the oldest step in flight; waits for it."""
        if not self._in_flight:
            return []
        output, future = self._in_flight.popleft()
        try:
            result = future.result()
        except EngineDeadError:
            raise
        except Exception as error:
            return self._fail(output, error)
        return self._scheduler.update(output, result)

    def _fail(self, output: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """Ends the requests of a step that raised; all others go on."""
        logger.error("step %d failed", output.step_id, exc_info=error)
        reason = f"the step that computed this request failed ({type(error).__name__}: {error}); send it again"
        return self._scheduler.fail_step(output, reason)


class _FailedStep:
    """A step that the runner did not take."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput:
        raise self._error
