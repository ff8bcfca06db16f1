"""A Runner without a model: each request's tokens follow a script, steps take as long as asked, and it can be told to
fail. `EngineConfig.model` carries the script as JSON, so that a spawned engine process can have one too."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from core.config import EngineConfig
from core.errors import EngineDeadError, ModelLoadError
from core.kv.groups import KVCacheGroups
from core.outputs import PositionLogprobs
from core.sampling_params import SamplingParams
from core.sched.output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from core.spec import CacheKind, DType, KVCacheSpec, ModelSpec

FACTORY = "stub_runner:make"
FILLER = 10
"""The id that a stub says where the script has an id that sampling must not draw."""


@dataclass(kw_only=True)
class Script:
    """What the stub does.

    Args:
        outputs: Prompt ids, comma separated, to the ids that follow; the last one repeats. A prompt that is not
            listed is answered with `FILLER + 1, FILLER + 2, ...`.
        step_s: Seconds that a step takes.
        load_error, exit_at_load, broken_while: Loading fails with this message, ends the process with this exit code,
            fails as long as this file exists.
        load_s: Seconds that loading takes.
        kill_on, raise_on, die_on, refuse_on: A prompt that begins with this id kills the process, makes the step
            raise, makes the runner declare itself dead, is given an error of its own.
    """

    outputs: dict[str, list[int]] = field(default_factory=dict)
    step_s: float = 0.0
    vocab_size: int = 1000
    max_model_len: int = 4096
    num_blocks: int = 64
    block_size: int = 16
    load_error: str = ""
    exit_at_load: int = 0
    broken_while: str = ""
    load_s: float = 0.0
    env_in_resolved: str = ""
    kill_on: int = -1
    raise_on: int = -1
    die_on: int = -1
    refuse_on: int = -1

    def model(self) -> str:
        """The value for `EngineConfig.model`."""
        return json.dumps(vars(self))


@dataclass
class _Mirror:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams

    @property
    def prompt(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]


class StubRunner:
    """See the module."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_blocks, self.block_size = script.num_blocks, script.block_size
        layer = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=1, head_dim=8, v_head_dim=8, dtype=DType.FLOAT32)
        self.groups = (layer,)
        self.cache_groups = KVCacheGroups.from_layers(self.groups)
        self.num_host_blocks = 0
        self.model_spec = ModelSpec(
            architecture="StubForCausalLM",
            dtype=DType.FLOAT32,
            hidden_size=8,
            vocab_size=script.vocab_size,
            max_model_len=script.max_model_len,
            layers=(layer,),
        )
        self.resolved = "stub " + os.environ.get(script.env_in_resolved, "")
        self.num_submitted = 0
        self.max_in_flight = 0
        self.closed = False
        self._in_flight: list[Future[ModelRunnerOutput]] = []
        self._mirrors: dict[str, _Mirror] = {}
        self._device = ThreadPoolExecutor(1)

    def submit(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.num_submitted += 1
        self._in_flight = [future for future in self._in_flight if not future.done()]
        future = self._device.submit(self._run, output)
        self._in_flight.append(future)
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))
        return future

    def close(self) -> None:
        self.closed = True
        self._device.shutdown(wait=False, cancel_futures=True)

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.dropped_request_ids:
            self._mirrors.pop(request_id, None)
        for request in output.new_requests:
            self._take_up(request)
        time.sleep(self.script.step_s)
        result = ModelRunnerOutput(step_id=output.step_id)
        for entry in output.scheduled:
            self._compute(entry, result)
        self._misbehave(output)
        return result

    def _take_up(self, request: NewRequest) -> None:
        assert len(request.block_ids) == len(self.groups)
        self._mirrors[request.request_id] = _Mirror(
            list(request.token_ids), request.num_prompt_tokens, request.sampling_params
        )

    def _compute(self, entry: ScheduledRequest, result: ModelRunnerOutput) -> None:
        mirror = self._mirrors[entry.request_id]
        start, end = entry.num_computed_tokens, entry.num_computed_tokens + entry.num_scheduled_tokens
        assert end <= len(mirror.token_ids), "a step must not run ahead of the tokens that exist"
        if mirror.params.prompt_logprobs is not None and start < mirror.num_prompt_tokens:
            first = max(1, start + 1)
            covered = mirror.token_ids[first : min(end + 1, mirror.num_prompt_tokens)]
            result.prompt_logprobs[entry.request_id] = (
                first,
                [self._logprobs(token_id, mirror.params.prompt_logprobs) for token_id in covered],
            )
        if not entry.samples:
            return
        assert end == len(mirror.token_ids), "a step samples behind the last token"
        if mirror.prompt[0] == self.script.refuse_on:
            result.errors[entry.request_id] = "every candidate is masked"
            mirror.token_ids.append(FILLER)  # the next step is on its way and reads some token
            return
        token_id = self._next(mirror)
        mirror.token_ids.append(token_id)
        result.sampled_token_ids[entry.request_id] = [token_id]
        if mirror.params.logprobs is not None:
            result.logprobs[entry.request_id] = [self._logprobs(token_id, mirror.params.logprobs)]

    def _next(self, mirror: _Mirror) -> int:
        position = len(mirror.token_ids) - mirror.num_prompt_tokens
        scripted = self.script.outputs.get(",".join(map(str, mirror.prompt)))
        if scripted is None:
            token_id = FILLER + 1 + position % 20
        else:
            token_id = scripted[min(position, len(scripted) - 1)]
        ending = {*mirror.params.eos_token_ids, *mirror.params.stop_token_ids}
        return FILLER if position < mirror.params.min_tokens and token_id in ending else token_id

    def _logprobs(self, token_id: int, count: int) -> PositionLogprobs:
        others: Sequence[int] = [i for i in range(count + 1) if i != token_id][:count]
        return PositionLogprobs((token_id, *others), (-0.5, *(-1.0 - i for i in range(len(others)))), 1)

    def _misbehave(self, output: SchedulerOutput) -> None:
        firsts = {self._mirrors[entry.request_id].prompt[0] for entry in output.scheduled}
        if self.script.kill_on in firsts:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.script.die_on in firsts:
            raise EngineDeadError("the device fell off the bus; restart the server")
        if self.script.raise_on in firsts:
            raise RuntimeError("a kernel failed")


def make(config: EngineConfig) -> StubRunner:
    """The runner factory."""
    script = Script(**json.loads(config.model))
    time.sleep(script.load_s)
    if script.broken_while and os.path.exists(script.broken_while):
        raise ModelLoadError(f"broken while {script.broken_while} is there; remove it")
    if script.load_error:
        raise ModelLoadError(script.load_error)
    if script.exit_at_load:
        os._exit(script.exit_at_load)
    return StubRunner(script)
