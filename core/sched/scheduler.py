"""Who runs in the next step, with how many tokens, and what a step's result means for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from core.config import SchedulerConfig
from core.errors import InvalidRequestError
from core.kv import KVCacheManager
from core.outputs import EngineOutput, EngineStats, FinishReason
from core.request import EngineRequest, Request, RequestStatus
from core.sched.admission import check_lengths, check_queue
from core.sched.chunk_bound import ChunkBound
from core.sched.output import ModelRunnerOutput, SchedulerOutput
from core.sched.prompts import Prompts
from core.sched.queue import order_key
from core.sched.registry import RequestRegistry
from core.sched.report import StepReport
from core.sched.running import RunningRequests
from core.sched.step import Share, StepBuilder

__all__ = ["Scheduler"]


class Scheduler:
    """Serves requests step by step: `output = schedule()`, run it, `update(output, result)`.

    There is one rule and no phases: `num_computed_tokens` of each request catches up with its tokens, within the
    token budget of a step. Running requests come before waiting ones, those with one token to compute before
    prompts, and a long prompt leaves room for shorter ones.

    `schedule()` may be called again before `update()` of earlier steps (asynchronous scheduling): the token that a
    step in flight will sample counts as there. Steps are reported in the order in which they were scheduled.
    A request is not scheduled again while a step in flight verifies drafts for it, since nobody knows where it stands,
    and with `num_spec_tokens` not before its last token is known, since drafts follow that one.

    Args:
        config: Bounds and policy.
        kv: The KV cache's books; used by this scheduler alone.
        clock: Seconds since the epoch.
        timer: Seconds from anywhere, to measure steps with.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.kv = kv
        self._capacity = kv.capacity_tokens(whole=not config.enable_chunked_prefill)
        self._stats = EngineStats()
        self._registry = RequestRegistry(order_key(config.scheduling_policy))
        self._running = RunningRequests(config, kv, self._registry, self._stats)
        self._bound = ChunkBound(config.max_step_stretch, timer) if config.max_step_stretch else None
        self._prompts = Prompts(config, kv, self._registry, self._running, self._stats, clock, self._bound)
        self._report = StepReport(kv, self._finish)
        self._in_flight: deque[tuple[SchedulerOutput, list[Share]]] = deque()
        self._next_step_id = 0

    def add_request(self, source: EngineRequest) -> None:
        """Takes a request into the waiting queue.

        Raises:
            InvalidRequestError: for an empty prompt or an id that is in use.
            ContextLengthError: where it can never fit the context window or the KV pool.
            QueueFullError: where too many wait already.
        """
        if source.request_id in self._registry.requests:
            raise InvalidRequestError(f"request_id {source.request_id!r} is in use; choose another", param="request_id")
        check_lengths(source, self.config.max_model_len, self._capacity)
        check_queue(len(self._registry.waiting), self.config)
        request = Request(source, self.config.max_model_len)
        # The last token is sampled and never computed: with this bound memory ends exactly where the output does.
        request.max_tokens = min(request.max_tokens, self._capacity + 1 - request.num_prompt_tokens)
        self._registry.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests at any time, gives their blocks back, and returns the ids that were there to be aborted.

        What a step in flight still produces for them is ignored. No EngineOutput is made.
        """
        return [request_id for request_id in request_ids if self._end(request_id, FinishReason.ABORT)]

    def fail(self, request_ids: Iterable[str], reason: str) -> list[EngineOutput]:
        """Ends requests with FinishReason.ERROR and returns their last outputs; unknown ids have no effect."""
        return [
            EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)
            for request_id in request_ids
            if self._end(request_id, FinishReason.ERROR)
        ]

    def set_draft_token_ids(self, request_id: str, draft_token_ids: Sequence[int]) -> None:
        """Proposes tokens to follow the request's last known one, to be verified in its next step.

        Dropped without effect where the request is unknown, does not run, or has a token in flight.
        """
        request = self._registry.running.get(request_id)
        if request is not None and request.num_pending_tokens == 0:
            request.draft_token_ids = tuple(draft_token_ids)

    def schedule(self) -> SchedulerOutput:
        """The next step. Where `empty`, there is nothing to run: await news, or report a step in flight.

        The caller hands it to the runner, and later to `update`, which needs outputs with `scheduled` only.
        An empty output uses up no `step_id`.
        """
        self.kv.begin_step()
        step = StepBuilder(SchedulerOutput(step_id=self._next_step_id), self.config.max_num_batched_tokens)
        if self.config.force_preemption:
            self._running.force_preemption(step)
        self._running.schedule(step)
        self._prompts.schedule(step)
        shares, output = step.finish(), step.output
        output.dropped_request_ids = self._registry.take_dropped()
        self._next_step_id += not output.empty
        if shares:
            self._in_flight.append((output, shares))
            if self._bound is not None:
                self._bound.scheduled(output, step.bound)
            self._stats.num_steps += 1
            self._stats.iteration_tokens = output.num_scheduled_tokens
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """What the result of a step brings: one output for each request that gained tokens or ended.

        Args:
            output: The oldest step that is not reported yet, as `schedule` returned it. Older ones are given up:
                requests in them that still live end with an error.
            result: What the runner made of it.
        """
        assert result.step_id == output.step_id, f"the result of step {result.step_id} for step {output.step_id}"
        if not output.scheduled:
            return []
        if self._bound is not None:
            self._bound.reported(output)
        lost = self._give_up_before(output)
        _, shares = self._in_flight.popleft()
        take = self._report.take
        news = lost + [told for share in shares if (told := take(share, result)) is not None]
        for request_id, draft_token_ids in result.draft_token_ids.items():
            self.set_draft_token_ids(request_id, draft_token_ids)
        return news

    def fail_step(self, output: SchedulerOutput, reason: str) -> list[EngineOutput]:
        """Instead of `update`, for a step that raised: ends the requests that it computed or was to swap out."""
        request_ids = [share.request_id for share in output.scheduled]
        for request_id in output.dropped_request_ids:
            request = self._registry.requests.get(request_id)
            if request is not None and request.status is RequestStatus.SWAPPED:
                request_ids.append(request_id)
        return self.fail(request_ids, reason)

    def reset_prefix_cache(self) -> bool:
        """Makes sure that no later request reuses what has been computed up to now; running requests go on.

        Returns:
            True: it is always possible.
        """
        self.kv.reset_prefix_cache()
        return True

    def has_work(self) -> bool:
        """Whether `schedule` has, or may soon have, anything to say: requests live, or the runner is to forget some."""
        return bool(self._registry.requests or self._registry.num_dropped)

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._registry.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, preempted ones included."""
        return len(self._registry.waiting)

    def stats(self) -> EngineStats:
        """Gauges and counters as of now, as a new value."""
        return msgspec.structs.replace(
            self._stats,
            num_requests_running=self.num_running,
            num_requests_waiting=self.num_waiting,
            kv_cache_usage=self.kv.usage,
            num_free_blocks=self.kv.pool.num_free_blocks,
            num_blocks=self.kv.pool.num_usable_blocks,
        )

    def check_integrity(self) -> None:
        """Asserts that requests, queues, counts and blocks agree."""
        self.kv.check_integrity()
        self._registry.check_integrity()
        requests = self._registry.requests.values()
        num_swapped = sum(request.status is RequestStatus.SWAPPED for request in requests)
        assert self.kv.num_holders == self.num_running + num_swapped, "blocks are held by requests that do not run"
        for request in requests:
            self._check_counts(request)

    def _check_counts(self, request: Request) -> None:
        assert 0 <= request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens, f"{request}"
        in_flight = [share for _, shares in self._in_flight for share in shares if share[0] is request]
        assert request.num_steps_in_flight == len(in_flight), f"{request} miscounts steps in flight"
        num_pending = sum(1 + len(share.draft_token_ids) for _, share, _ in in_flight if share.samples)
        assert request.num_pending_tokens == num_pending, f"{request} miscounts pending tokens"

    def _give_up_before(self, output: SchedulerOutput) -> list[EngineOutput]:
        lost: list[EngineOutput] = []
        while self._in_flight and self._in_flight[0][0].step_id < output.step_id:
            _, shares = self._in_flight.popleft()
            alive = [request.request_id for request, _, _ in shares if not request.finished]
            lost += self.fail(alive, "the step that computed this request was never reported; send it again")
        assert self._in_flight and self._in_flight[0][0] is output, f"step {output.step_id} was reported already"
        return lost

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        request = self._registry.requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request is not None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Takes a request out of everything. Only the records of steps in flight still know it."""
        self._registry.remove(request, reason)
        self.kv.free(request)
        self._report.forget(request)
