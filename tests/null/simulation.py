"""Drives a Scheduler and a FakeRunner together, checking the books after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_runner import Drafter, FakeRunner, reference_output

from core.config import SchedulerConfig
from core.kv import HostTier, KVCacheGroups, KVCacheManager
from core.outputs import EngineOutput, FinishReason
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.sched import ModelRunnerOutput, Scheduler, SchedulerOutput
from core.spec import CacheKind, DType, KVCacheSpec


def full_layer() -> KVCacheSpec:
    """A layer that attends to everything."""
    return KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=1, head_dim=8, v_head_dim=8, dtype=DType.FLOAT32)


def sliding_layer(window: int) -> KVCacheSpec:
    """A layer that attends to the last `window` tokens."""
    return KVCacheSpec(
        kind=CacheKind.SLIDING, num_kv_heads=1, head_dim=8, v_head_dim=8, dtype=DType.FLOAT32, window=window
    )


UNIFORM = (full_layer(),)


def make_kv(
    layers: Sequence[KVCacheSpec] = UNIFORM,
    num_blocks: int = 65,
    block_size: int = 4,
    *,
    prefix_caching: bool = True,
    num_host_blocks: int | None = None,
) -> KVCacheManager:
    """A small KV cache."""
    tier = None if num_host_blocks is None else HostTier(num_host_blocks)
    return KVCacheManager(
        KVCacheGroups.from_layers(layers),
        num_blocks,
        block_size,
        enable_prefix_caching=prefix_caching,
        swap_tier=tier,
    )


@dataclass
class Record:
    """What a request asked for and what came out."""

    source: EngineRequest
    tokens: list[int] = field(default_factory=list)
    outputs: list[EngineOutput] = field(default_factory=list)
    reason: FinishReason | None = None


class Simulation:
    """A scheduler with a runner. `depth` results are held back: 0 is synchronous scheduling."""

    def __init__(self, kv: KVCacheManager, *, depth: int = 0, drafter: Drafter | None = None, **config: Any) -> None:
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 512, **config}
        self.config = SchedulerConfig(**settings)
        self.kv = kv
        self.scheduler = Scheduler(self.config, kv)
        self.runner = FakeRunner(kv.groups, kv.block_size)
        self.depth = depth
        self.drafter = drafter
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.records: dict[str, Record] = {}
        self.steps: list[SchedulerOutput] = []

    def add(self, request_id: str, prompt: Sequence[int], *, salt: str | None = None, adapter: str | None = None,
            priority: int = 0, **params: Any) -> Record:  # fmt: skip
        """Adds a request; `params` go to SamplingParams."""
        source = EngineRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(temperature=0.0, **params),
            priority=priority,
            cache_salt=salt,
            adapter=adapter,
            arrival_time=float(len(self.records)),
        )
        self.scheduler.add_request(source)
        record = self.records[request_id] = Record(source)
        return record

    def step(self) -> SchedulerOutput:
        """Schedules and executes a step, and reports the oldest one when enough are in flight."""
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert output.num_scheduled_tokens <= self.config.max_num_batched_tokens
        assert len(output.scheduled) <= self.config.max_num_seqs
        self.steps.append(output)
        if not output.empty:
            self.pending.append((output, self.runner.execute(output)))
        if output.empty or len(self.pending) > self.depth:
            self.report()
        return output

    def report(self) -> None:
        """Reports the oldest step in flight."""
        if self.pending:
            self.take(self.scheduler.update(*self.pending.popleft()))
            self.scheduler.check_integrity()
            self._draft()

    def take(self, outputs: Iterable[EngineOutput]) -> None:
        """Books outputs to their requests; none may come after the last."""
        for output in outputs:
            record = self.records[output.request_id]
            assert record.reason is None, f"{output} after the end"
            record.tokens += output.new_token_ids
            record.outputs.append(output)
            record.reason = output.finish_reason

    def abort(self, *request_ids: str) -> list[str]:
        """Aborts requests."""
        aborted = self.scheduler.abort(request_ids)
        for request_id in aborted:
            assert self.records[request_id].reason is None
            self.records[request_id].reason = FinishReason.ABORT
        self.scheduler.check_integrity()
        return aborted

    def run(self, max_steps: int = 30_000) -> None:
        """Runs until nothing is left, and checks that nothing is left."""
        for _ in range(max_steps):
            if not (self.scheduler.has_work() or self.pending):
                break
            waited = bool(self.pending)
            assert not self.step().empty or waited, "nothing runs and nothing is awaited"
        else:
            raise AssertionError(f"not done after {max_steps} steps")
        self.check_idle()

    def check_idle(self) -> None:
        """Asserts that no block, request or mirror is left."""
        assert self.kv.pool.num_free_blocks == self.kv.pool.num_usable_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.runner.mirrors, "the runner still knows requests"
        self.kv.begin_step()
        if self.kv.swap_tier is not None:
            assert self.kv.swap_tier.num_free_blocks == self.kv.swap_tier.num_blocks
        self.scheduler.check_integrity()

    def check_reference(self) -> None:
        """Asserts that each request gave what it would give alone; aborted and failed ones, a part of it."""
        whole = not self.config.enable_chunked_prefill
        max_total = min(self.config.max_model_len, self.kv.capacity_tokens(whole=whole) + 1)
        for record in self.records.values():
            source = record.source
            right = reference_output(source.prompt_token_ids, source.sampling_params, max_total, source.adapter)
            if record.reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert record.tokens == right[: len(record.tokens)]
            else:
                assert record.reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert record.tokens == right, source.request_id

    def _draft(self) -> None:
        if self.drafter is not None:
            for request_id, record in self.records.items():
                if record.reason is None and record.tokens:
                    tokens = record.source.prompt_token_ids + record.tokens
                    drafts = self.drafter(tokens, len(record.source.prompt_token_ids))
                    self.scheduler.set_draft_token_ids(request_id, drafts)
