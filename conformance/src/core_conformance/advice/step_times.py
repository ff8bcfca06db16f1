"""Where the time of a step goes: every bound operation timed on the device, in prefill steps and in decode steps."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from core.backend import Backend
from core.backend.negotiate import Resolved
from core.backend.ops import OpSpec
from core.config import CacheConfig, EngineConfig, SchedulerConfig
from core.engine.build import build_engine
from core.engine.engine import Engine
from core.errors import CoreError
from core.exec.build import build_runner
from core.exec.model_runner import ModelRunner
from core.loader.checkpoint import open_checkpoint
from core.plugins import list_models
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core_conformance.target import Target

__all__ = ["PHASES", "OperationTime", "Phase", "StepFailedError", "StepTimes", "Stopwatch", "measure"]

Phase = Literal["decode", "prefill"]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
"""Kinds of step that are measured."""

NUM_REQUESTS = 4
"""Requests of each step."""
PROMPT_TOKENS = 128
"""Tokens of each prompt; a prefill step computes all of them."""
_DECODE_STEPS = 12
_PREFILL_STEPS = 3


class StepFailedError(CoreError):
    """A step that was to be measured raised on the device."""


@dataclass
class OperationTime:
    """One operation, static parameters and all, and the time spent in it, that of its parts not counted.

    Args:
        row: How it was resolved.
        seconds: By phase, over all steps of that phase.
        calls: By phase.
    """

    row: Resolved
    seconds: dict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[Phase, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def op(self) -> OpSpec:
        """The operation."""
        return self.row.op


class Stopwatch:
    """An observer of a Binder that times each call, the device's work included; parts count for themselves.

    Args:
        backend: Opened; its `fence` says when the device is done.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._of_parts = 0.0
        self.phase: Phase | None = None
        """What calls are counted for; None counts none."""
        self.times: dict[OpSpec, OperationTime] = {}

    def __call__(self, row: Resolved, fn: Callable[..., Any]) -> Callable[..., Any]:
        entry = self.times.setdefault(row.op, OperationTime(row))

        def timed(args: Any) -> Any:
            self._backend.fence().wait()
            before, self._of_parts = self._of_parts, 0.0
            start = perf_counter()
            result = fn(args)
            self._backend.fence().wait()
            seconds = perf_counter() - start
            if self.phase is not None:
                entry.seconds[self.phase] += seconds - self._of_parts
                entry.calls[self.phase] += 1
            self._of_parts = before + seconds
            return result

        return timed


@dataclass(frozen=True)
class StepTimes:
    """What was measured.

    Args:
        model: Folder or name.
        dtype: Type of activations.
        operations: Everything that the model binds.
        num_steps: By phase.
        seconds: By phase, of whole steps.
    """

    model: str
    dtype: str
    operations: list[OperationTime]
    num_steps: dict[Phase, int]
    seconds: dict[Phase, float]

    def share(self, entry: OperationTime, phase: Phase) -> float:
        """Part of a step's time that goes into the operation itself, in [0, 1]."""
        return entry.seconds[phase] / self.seconds[phase]

    def outside(self, phase: Phase) -> float:
        """Part of a step's time outside of all operations, in [0, 1]."""
        return max(0.0, 1 - sum(self.share(entry, phase) for entry in self.operations))


def measure(target: Target, model: str | Path) -> StepTimes:
    """Runs prefill and decode steps of a model, one at a time, the device awaited around each operation.

    Args:
        target: The backend; a fresh instance of it is opened and closed.
        model: A folder or GGUF file.

    Raises:
        StepFailedError: a step raised.
        CoreError: the model cannot be loaded or the device refuses one of its operations.
    """
    watches: list[Stopwatch] = []

    def factory(config: EngineConfig) -> ModelRunner:
        backend = target.open()
        watches.append(Stopwatch(backend))
        with open_checkpoint(Path(model)) as checkpoint:
            return build_runner(
                config,
                checkpoint,
                backend,
                target.info,
                target.device,
                extra_models=list_models(),
                observe=watches[0],
            )

    engine = build_engine(_config(str(model)), runner_factory=factory)
    try:
        run = _Run(engine, watches[0])
        run.prefill(counted=False)
        run.decode(counted=False)
        for _ in range(_PREFILL_STEPS):
            run.prefill()
        run.decode()
        operations = [entry for entry in watches[0].times.values() if any(entry.calls.values())]
        return StepTimes(str(model), engine.facts.dtype, operations, run.num_steps, run.seconds)
    finally:
        engine.close()


def _config(model: str) -> EngineConfig:
    longest = PROMPT_TOKENS + _DECODE_STEPS + 2
    tokens = 2 * NUM_REQUESTS * PROMPT_TOKENS  # half of it is the most that one step takes of a prompt beside others
    scheduler = SchedulerConfig(max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=tokens, async_scheduling=False)
    cache = CacheConfig(enable_prefix_caching=False)
    return EngineConfig(model=model, max_model_len=longest, scheduler=scheduler, cache=cache)


class _Run:
    """Requests driven through an engine, steps counted by phase."""

    def __init__(self, engine: Engine, watch: Stopwatch) -> None:
        self._engine, self._watch = engine, watch
        self._draw = random.Random(0)
        self._num_requests = 0
        self.num_steps: dict[Phase, int] = defaultdict(int)
        self.seconds: dict[Phase, float] = defaultdict(float)

    def prefill(self, *, counted: bool = True) -> None:
        """One step that computes every prompt and gives each its only token."""
        self._start(max_tokens=1)
        while self._engine.has_work():
            self._step("prefill" if counted else None)

    def decode(self, *, counted: bool = True) -> None:
        """Steps of one token for each request; their prompts are not counted."""
        waiting = self._start(max_tokens=_DECODE_STEPS + 1)
        while waiting:
            waiting -= self._step(None)
        while self._engine.has_work():
            self._step("decode" if counted else None)

    def _start(self, max_tokens: int) -> set[str]:
        vocab = self._engine.facts.vocab_size
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        requests = []
        for _ in range(NUM_REQUESTS):
            self._num_requests += 1
            prompt = [self._draw.randrange(vocab) for _ in range(PROMPT_TOKENS)]
            requests.append(
                EngineRequest(request_id=f"r{self._num_requests}", prompt_token_ids=prompt, sampling_params=params)
            )
        self._engine.add_requests(requests)
        return {request.request_id for request in requests}

    def _step(self, phase: Phase | None) -> set[str]:
        """Runs one step and gives the ids of requests that got a token; a step without any is not counted."""
        self._watch.phase = phase
        start = perf_counter()
        outputs = self._engine.step()
        seconds = perf_counter() - start
        self._watch.phase = None
        failed = [output.error for output in outputs if output.error]
        if failed:
            raise StepFailedError(f"a measured step failed: {failed[0]}; run `core conformance run` first")
        if phase is not None and outputs:
            self.seconds[phase] += seconds
            self.num_steps[phase] += 1
        return {output.request_id for output in outputs if output.new_token_ids}
