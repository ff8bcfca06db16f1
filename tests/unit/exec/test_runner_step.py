"""A submitted step is a future: waited for, told once it ended, raising what it raised."""

from __future__ import annotations

import threading
import time

import pytest

from core.exec.runner_step import RunnerStep
from core.exec.step_result import StepResult
from core.sched.output import ModelRunnerOutput, SchedulerOutput

OUTPUT = ModelRunnerOutput(step_id=3)


def _finalize(step: StepResult) -> ModelRunnerOutput:
    assert step.step_id == 3
    return OUTPUT


def _execute(output: SchedulerOutput) -> StepResult:
    return StepResult(step_id=output.step_id)


def _fail(output: SchedulerOutput) -> StepResult:
    raise ValueError(f"step {output.step_id}")


def test_a_step_is_waited_for_by_whoever_asks() -> None:
    step = RunnerStep(SchedulerOutput(step_id=3), _execute, _finalize)
    found: list[ModelRunnerOutput] = []
    threads = [threading.Thread(target=lambda: found.append(step.result())) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert not step.done() and not found
    step.run()
    for thread in threads:
        thread.join()
    assert step.done() and found == [OUTPUT] * 3 and step.result() is OUTPUT


def test_a_step_that_raised_raises_for_whoever_asks() -> None:
    step = RunnerStep(SchedulerOutput(step_id=3), _fail, _finalize)
    step.run()
    assert step.done()
    for _ in range(2):
        with pytest.raises(ValueError, match="step 3"):
            step.result()
