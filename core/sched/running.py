"""Running requests: a token for each that has one to compute, and room for them by preemption."""

from __future__ import annotations

from collections.abc import Sequence

from core.config import SchedulerConfig
from core.kv import KVCacheManager
from core.outputs import EngineStats
from core.request import Request, RequestStatus
from core.sched.finish import token_limit
from core.sched.registry import RequestRegistry
from core.sched.step import StepBuilder

__all__ = ["RunningRequests"]


class RunningRequests:
    """Schedules requests that hold blocks.

    Under the order of the registry a request is only ever preempted for one that comes before it. So the first in
    order always goes on, and no two requests can preempt each other forever.

    Args:
        config: Bounds and policy.
        kv: The KV cache's books.
        registry: The requests.
        stats: Counters to keep.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, registry: RequestRegistry, stats: EngineStats
    ) -> None:
        self._config = config
        self._kv = kv
        self._registry = registry
        self._stats = stats

    def schedule(self, step: StepBuilder) -> None:
        """Schedules each request with one token to compute; those with more are collected in `step.prompts`."""
        running = self._registry.running
        block_size = self._kv.block_size
        awaits_drafts = self._config.num_spec_tokens > 0
        num_left = len(running)
        for request in list(running.values()):
            num_left -= 1
            num_tokens = len(request.all_token_ids) + request.num_pending_tokens
            remaining = num_tokens - request.num_computed_tokens
            if remaining > 1:
                step.prompts.append(request)
            elif (
                remaining < 1  # all it has is on its way
                or request.status is not RequestStatus.RUNNING  # preempted in this step, for one before it
                or request.num_drafts_in_flight  # nobody knows yet where it stands
                or (awaits_drafts and request.num_pending_tokens)  # drafts follow the token that is on its way
                or num_tokens >= request.num_prompt_tokens + request.max_tokens > request.num_prompt_tokens
            ):
                continue
            elif request.draft_token_ids:
                self.grow(request, step, 1, _take_drafts(request, num_tokens, step.budget - 1 - num_left))
            elif request.num_computed_tokens % block_size:  # the token before has opened the block
                step.add(request, 1, self._kv.no_block_ids)
            else:
                self.grow(request, step, 1)
        step.prompts = sorted(filter(_runs, step.prompts), key=self._registry.key)
        step.prompt_budget = step.budget

    def grow(self, request: Request, step: StepBuilder, num_tokens: int, drafts: Sequence[int] = ()) -> None:
        """Schedules a running request, with fewer tokens where blocks are scarce, preempting where there are none."""
        while (block_ids := self._kv.allocate_slots(request, num_tokens + len(drafts))) is None:
            fitting = self._kv.num_fitting_tokens(request)
            if drafts:
                drafts = ()
            elif 0 < fitting < num_tokens and self._config.enable_chunked_prefill:
                num_tokens = fitting
            elif not self._make_room(request, step):
                return
        step.add(request, num_tokens, block_ids, drafts)

    def force_preemption(self, step: StepBuilder) -> None:
        """Preempts one request that gained a token since it began to run: only such can be preempted without end."""
        gained = [
            request
            for request in self._registry.running.values()
            if request.num_output_tokens + request.num_pending_tokens > request.num_output_at_start
        ]
        if gained:
            self._preempt(max(gained, key=self._registry.key), step)

    def _make_room(self, request: Request, step: StepBuilder) -> bool:
        """Preempts the request that is last in order; False where the request itself must wait."""
        running = self._registry.running
        victim = max(running.values(), key=self._registry.key)
        if victim is request and len(running) == 1:
            # Alone it fits (add_request saw to that) once the steps in flight have given back what left its window.
            assert request.num_steps_in_flight, f"{request} has the pool for itself and does not fit"
            return False
        step.lacks_blocks = True
        self._preempt(victim, step)
        return victim is not request

    def _preempt(self, victim: Request, step: StepBuilder) -> None:
        """Sends a running request back to the queue. Tokens in flight for it arrive with their step's result."""
        assert not any(new.request_id == victim.request_id for new in step.output.new_requests), f"{victim} just began"
        step.remove(victim)
        pairs = self._kv.swap_out(victim) if self._config.preemption_mode == "swap" else None
        if pairs is not None:
            step.output.swap_out.extend(pairs)
            self._registry.suspend(victim, RequestStatus.SWAPPED)
        else:
            self._kv.free(victim)
            victim.num_computed_tokens = 0
            victim.num_restarts += 1
            self._registry.suspend(victim, RequestStatus.PREEMPTED)
        self._stats.num_preemptions += 1


def _runs(request: Request) -> bool:
    return request.status is RequestStatus.RUNNING


def _take_drafts(request: Request, num_tokens: int, budget: int) -> Sequence[int]:
    """Drafts that budget and `max_tokens` leave room for; those of the request are used up."""
    drafts, request.draft_token_ids = request.draft_token_ids, ()
    return drafts[: max(0, min(budget, token_limit(request) - num_tokens - 1))]
