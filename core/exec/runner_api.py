"""The seam between the engine and whatever computes its steps: one submit, one future, a few facts."""

from __future__ import annotations

from typing import Protocol

from core.kv.groups import KVCacheGroups
from core.sched.output import ModelRunnerOutput, SchedulerOutput
from core.spec import KVCacheSpec, ModelSpec

__all__ = ["Runner", "RunnerFuture"]


class RunnerFuture(Protocol):
    """One submitted step."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, without waiting."""
        ...

    def result(self) -> ModelRunnerOutput:
        """What the step gave; blocks until the device has finished it.

        Called exactly once for each step, in the order of submission.

        Raises:
            EngineDeadError: the runner can never run a step again; the process has to end.
            Exception: this step failed and the next may work; the requests of the step are lost.
        """
        ...


class Runner(Protocol):
    """Runs steps of one model on one device (or one group of devices), in the order of submission.

    Owns the weights, the KV pool and a mirror of each request that it was told of.
    """

    @property
    def model_spec(self) -> ModelSpec:
        """Shape of the served model."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, the reserved block 0 included."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory that swap pairs may name; 0 where nothing is swapped."""
        ...

    @property
    def groups(self) -> tuple[KVCacheSpec, ...]:
        """One spec for each cache group, in the order of `NewRequest.block_ids`."""
        ...

    @property
    def cache_groups(self) -> KVCacheGroups:
        """The same groups with their layers, as the KVCacheManager takes them."""
        ...

    @property
    def resolved(self) -> str:
        """One line for people: the device, the dtype and how operations were resolved."""
        ...

    def submit(self, output: SchedulerOutput) -> RunnerFuture:
        """Takes the step and returns at once; never waits for the device.

        The runner may keep `output` until the step's result was taken; the caller does not change it any more.
        With asynchronous scheduling a step is submitted before the tokens that it continues from are known to the
        host: those stay on the device.

        Raises:
            EngineDeadError: as for `RunnerFuture.result`.
            Exception: the step was not taken.
        """
        ...

    def close(self) -> None:
        """Frees the device. Steps in flight are given up. A second call has no effect."""
        ...
