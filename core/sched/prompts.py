"""What decodes leave of a step, shared between prompts: running ones in chunks, and waiting ones that can start."""

from __future__ import annotations

from collections.abc import Callable

from core.config import SchedulerConfig
from core.kv import KVCacheManager, PrefixHit
from core.outputs import EngineStats
from core.request import Request, RequestStatus
from core.sched.chunk_bound import SHORT_PROMPT, ChunkBound
from core.sched.registry import RequestRegistry
from core.sched.running import RunningRequests
from core.sched.step import StepBuilder

__all__ = ["Prompts"]


class Prompts:
    """Schedules requests with more than one token to compute, and starts waiting ones.

    Short prompts are served in order, besides one long prompt, which takes at most half of the budget while others
    want it too; further long prompts get what is left after that. So neither keeps the other from running.

    Args:
        config: Bounds and policy.
        kv: The KV cache's books.
        registry: The requests.
        running: Grows requests that run.
        stats: Counters to keep.
        clock: Seconds since the epoch.
        bound: What prompts may cost those that generate; None where that is nobody's concern.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        registry: RequestRegistry,
        running: RunningRequests,
        stats: EngineStats,
        clock: Callable[[], float],
        bound: ChunkBound | None = None,
    ) -> None:
        self._bound = bound if config.enable_chunked_prefill else None
        self._chunked = config.enable_chunked_prefill
        self._kv = kv
        self._registry = registry
        self._running = running
        self._stats = stats
        self._clock = clock
        # One token a step for each running request is what keeps decodes from starving.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._long_threshold = config.long_prefill_token_threshold or (config.max_num_batched_tokens + 1) // 2

    def schedule(self, step: StepBuilder) -> None:
        """Fills the rest of the step."""
        num_waiting = len(self._registry.waiting) if len(self._registry.running) < self._max_running else 0
        step.contended = len(step.prompts) + num_waiting > 1
        if self._bound is not None and (step.prompts or num_waiting):
            start = step.prompts[0].num_computed_tokens if step.prompts else 0
            step.bound, step.lenient = self._bound.num_tokens(step.num_shares, start), self._bound.lenient
        deferred = []
        for request in list(step.prompts):
            if step.has_long and self._is_long(_remaining(request), step):
                deferred.append(request)
            else:
                self._grow(request, step)
        self._admit(step, more_long=False)
        for request in deferred:
            self._grow(request, step, may_preempt=False)
        if step.has_long:
            self._admit(step, more_long=True)

    def _grow(self, request: Request, step: StepBuilder, *, may_preempt: bool = True) -> None:
        """Schedules a chunk of a running prompt. Once requests were started in a step, nothing is preempted in it."""
        if request.status is not RequestStatus.RUNNING:
            return
        num_tokens = self._chunk(_remaining(request), step)
        if not may_preempt:
            num_tokens = min(num_tokens, self._kv.num_fitting_tokens(request))
        if num_tokens:
            self._running.grow(request, step, num_tokens)

    def _is_long(self, remaining: int, step: StepBuilder) -> bool:
        threshold = self._long_threshold
        if step.bound is not None and not (step.lenient and remaining <= SHORT_PROMPT):
            threshold = min(threshold, step.bound)
        return self._chunked and remaining > threshold

    def _chunk(self, remaining: int, step: StepBuilder) -> int:
        """Tokens of a prompt to compute in this step; 0 where the budget forbids any."""
        if not self._chunked:
            return remaining if remaining <= step.budget else 0
        limit = max(step.prompt_room(short=remaining <= SHORT_PROMPT), 0)
        if self._is_long(remaining, step):
            step.has_long = True
            if step.contended:
                wanted = step.prompt_budget if step.bound is None else min(step.prompt_budget, step.bound)
                limit = min(limit, self._long_threshold, (wanted + 1) // 2)
        return min(remaining, limit)

    def _admit(self, step: StepBuilder, *, more_long: bool) -> None:
        """Starts waiting requests in order until budget, places or blocks end.

        A request that lacks blocks holds up those behind it, else small ones would keep it waiting forever.
        """
        started: list[Request] = []
        for request in self._registry.waiting:
            if step.prompt_room(short=True) <= 0 or step.lacks_blocks or self._is_full():
                break
            if request.num_pending_tokens:
                continue  # what it sampled before it was preempted is on its way
            hit = None if request.status is RequestStatus.SWAPPED else self._kv.get_computed_blocks(request)
            remaining = request.num_tokens - (request.num_computed_tokens if hit is None else hit.num_tokens)
            if step.has_long and not more_long and self._is_long(remaining, step):
                continue
            if not self._start(request, hit, self._chunk(remaining, step), step):
                break
            started.append(request)
        for request in started:
            self._registry.waiting.remove(request)

    def _is_full(self) -> bool:
        return len(self._registry.running) >= self._max_running

    def _start(self, request: Request, hit: PrefixHit | None, num_tokens: int, step: StepBuilder) -> bool:
        """Starts or resumes a request with up to `num_tokens` tokens; False, and nothing changed, if it must wait."""
        reserved = sum(self._kv.num_outstanding_blocks(prompt) for prompt in step.prompts)
        if not num_tokens or not self._kv.can_admit(request, hit, reserved):
            return False
        if not (self._restore(request, step) if hit is None else self._take_hit(request, hit, num_tokens)):
            return False
        if self._chunked:
            num_tokens = min(num_tokens, self._kv.num_fitting_tokens(request, hit))
        block_ids = self._kv.allocate_slots(request, num_tokens, hit)
        assert block_ids is not None and num_tokens > 0, f"{request} was admitted and does not fit"
        self._registry.start(request)
        self._note_first_start(request)
        step.add_new(request, self._kv.block_ids(request))
        step.add(request, num_tokens, self._kv.no_block_ids)
        if _remaining(request) > 0:
            step.prompts.append(request)
        return True

    def _restore(self, request: Request, step: StepBuilder) -> bool:
        """Gives a swapped-out request device blocks again, where there are enough."""
        pairs = self._kv.swap_in(request)
        step.output.swap_in.extend(pairs or ())
        return pairs is not None

    def _take_hit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """Starts a request behind its prefix hit, unless it must be computed in one step and cannot."""
        request.num_computed_tokens = hit.num_tokens
        if self._chunked or self._kv.num_fitting_tokens(request, hit) >= num_tokens:
            return True
        request.num_computed_tokens = 0
        return False

    def _note_first_start(self, request: Request) -> None:
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            self._stats.prefix_cache_queries += request.num_prompt_tokens
            self._stats.prefix_cache_hits += request.num_cached_tokens


def _remaining(request: Request) -> int:
    return request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
