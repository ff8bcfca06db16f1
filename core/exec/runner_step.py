"""A step on its way through the runner's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from core.exec.step_result import StepResult
from core.sched.output import ModelRunnerOutput, SchedulerOutput

__all__ = ["RunnerStep"]


class RunnerStep:
    """A submitted step, as the engine waits for it: a future that costs one lock.

    Args:
        output: What to run.
        execute: Runs it; called by the runner's thread.
        finalize: Waits for what `execute` gave; called by whoever wants the tokens, as often as they ask.
    """

    __slots__ = ("_ended", "_error", "_execute", "_finalize", "_output", "_result")

    def __init__(
        self,
        output: SchedulerOutput,
        execute: Callable[[SchedulerOutput], StepResult],
        finalize: Callable[[StepResult], ModelRunnerOutput],
    ) -> None:
        self._output, self._execute, self._finalize = output, execute, finalize
        self._result: StepResult | None = None
        self._error: BaseException | None = None
        self._ended = threading.Lock()
        """Held until there is a result or an error."""
        self._ended.acquire()

    def run(self) -> None:
        """Called once, by the runner's thread; never raises."""
        try:
            self._result = self._execute(self._output)
        except BaseException as error:
            self._error = error
        self._ended.release()

    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._error is not None or (self._result is not None and self._result.pending.done())

    def result(self) -> ModelRunnerOutput:
        """The step's tokens; waits for them.

        Raises:
            Exception: whatever the step raised.
        """
        with self._ended:  # whoever comes in lets the next one in
            pass
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._finalize(self._result)
