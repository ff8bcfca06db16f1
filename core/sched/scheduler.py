"""Who runs in the next step, with how many tokens, and what a step's result means for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from core.config import SchedulerConfig
from core.errors import InvalidRequestError
from core.kv import KVCacheManager, PrefixHit
from core.outputs import EngineOutput, EngineStats, FinishReason
from core.request import EngineRequest, Request, RequestStatus
from core.sched.admission import check_lengths, check_queue
from core.sched.finish import token_limit
from core.sched.output import ModelRunnerOutput, SchedulerOutput
from core.sched.queue import WaitingQueue, order_key
from core.sched.report import StepReport
from core.sched.step import Share, StepBuilder

__all__ = ["Scheduler"]


class Scheduler:
    """Serves requests step by step: `output = schedule()`, run it, `update(output, result)`.

    There is one rule and no phases: `num_computed_tokens` of each request catches up with its tokens, within the
    token budget of a step. Running requests come before waiting ones, those with one token to compute before
    prompts, and a long prompt leaves room for shorter ones.

    `schedule()` may be called again before `update()` of earlier steps (asynchronous scheduling): the token that a
    step in flight will sample counts as there. Steps are reported in the order in which they were scheduled.
    A request is not scheduled again while a step in flight verifies drafts for it, since nobody knows where it stands.

    Args:
        config: Bounds and policy.
        kv: The KV cache's books; used by this scheduler alone.
        clock: Seconds since the epoch.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, *, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self.kv = kv
        self._clock = clock
        self._key = order_key(config.scheduling_policy)
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue(self._key)
        self._running: dict[str, Request] = {}
        self._in_flight: deque[tuple[SchedulerOutput, list[Share]]] = deque()
        self._known_to_runner: set[str] = set()
        self._dropped: list[str] = []
        self._capacity = kv.capacity_tokens(whole=not config.enable_chunked_prefill)
        # One token a step for each running request is what keeps decodes from starving.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._long_threshold = config.long_prefill_token_threshold or (config.max_num_batched_tokens + 1) // 2
        self._num_arrived = 0
        self._next_step_id = 0
        self._stats = EngineStats()
        self._report = StepReport(kv, self._finish)

    # Requests

    def add_request(self, source: EngineRequest) -> None:
        """Takes a request into the waiting queue.

        Raises:
            InvalidRequestError: for an empty prompt or an id that is in use.
            ContextLengthError: where it can never fit the context window or the KV pool.
            QueueFullError: where too many wait already.
        """
        if source.request_id in self._requests:
            raise InvalidRequestError(f"request_id {source.request_id!r} is in use; choose another", param="request_id")
        check_lengths(source, self.config.max_model_len, self._capacity)
        check_queue(len(self._waiting), self.config)
        request = Request(source, self.config.max_model_len)
        # The last token is sampled and never computed; so memory ends exactly where the output does.
        request.max_tokens = min(request.max_tokens, self._capacity + 1 - request.num_prompt_tokens)
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests at any time, gives their blocks back, and returns the ids that were there to be aborted.

        What a step in flight still produces for them is ignored. No EngineOutput is made.
        """
        aborted = [request_id for request_id in request_ids if self._end(request_id, FinishReason.ABORT)]
        return aborted

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
        request = self._running.get(request_id)
        if request is not None and request.num_pending_tokens == 0:
            request.draft_token_ids = tuple(draft_token_ids)

    @property
    def num_running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run, preempted ones included."""
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether `schedule` has, or may soon have, anything to say: requests live, or the runner is to forget some."""
        return bool(self._requests or self._dropped)

    def stats(self) -> EngineStats:
        """Gauges and counters as of now, as a new value."""
        pool, stats = self.kv.pool, self._stats
        return EngineStats(
            num_requests_running=len(self._running),
            num_requests_waiting=len(self._waiting),
            kv_cache_usage=pool.usage,
            num_free_blocks=pool.num_free_blocks,
            num_blocks=pool.num_usable_blocks,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_steps=stats.num_steps,
            iteration_tokens=stats.iteration_tokens,
        )

    def reset_prefix_cache(self) -> bool:
        """Makes sure that no later request reuses what has been computed up to now; running requests go on.

        Returns:
            True: it is always possible.
        """
        self.kv.reset_prefix_cache()
        return True

    # Steps

    def schedule(self) -> SchedulerOutput:
        """The next step. Where `empty`, there is nothing to run: await news, or report a step in flight.

        The caller hands it to the runner and later to `update` (which an output without `scheduled` does not need).
        """
        self.kv.begin_step()
        step = StepBuilder(SchedulerOutput(step_id=self._next_step_id), self.config.max_num_batched_tokens)
        if self.config.force_preemption:
            self._force_preemption(step)
        self._schedule_running(step)
        self._schedule_prompts(step)
        shares = step.finish()
        output = step.output
        output.dropped_request_ids, self._dropped = self._dropped, []
        self._count_step(output)
        if shares:
            self._in_flight.append((output, shares))
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineOutput]:
        """What the result of a step brings: one output for each request that gained tokens or ended.

        Args:
            output: The oldest step that is not reported yet, as `schedule` returned it.
            result: What the runner made of it.
        """
        assert result.step_id == output.step_id, f"the result of step {result.step_id} for step {output.step_id}"
        if not output.scheduled:
            return []
        lost = self._give_up_before(output)
        _, shares = self._in_flight.popleft()
        take = self._report.take
        return lost + [news for share in shares if (news := take(share, result)) is not None]

    def fail_step(self, output: SchedulerOutput, reason: str) -> list[EngineOutput]:
        """Instead of `update`, for a step that raised: ends the requests that it computed or was to swap out."""
        request_ids = [share.request_id for share in output.scheduled]
        for request_id in output.dropped_request_ids:
            request = self._requests.get(request_id)
            if request is not None and request.status is RequestStatus.SWAPPED:
                request_ids.append(request_id)
        return self.fail(request_ids, reason)

    def _give_up_before(self, output: SchedulerOutput) -> list[EngineOutput]:
        """Forgets older steps that were never reported; requests in them that still live end with an error."""
        lost: list[EngineOutput] = []
        while self._in_flight and self._in_flight[0][0].step_id < output.step_id:
            _, shares = self._in_flight.popleft()
            alive = [request.request_id for request, _, _ in shares if not request.finished]
            lost += self.fail(alive, "the step that computed this request was never reported; send it again")
        return lost

    def check_integrity(self) -> None:
        """Asserts that requests, queues, counts and blocks agree."""
        self.kv.check_integrity()
        waiting = {request.request_id: request for request in self._waiting}
        assert not waiting.keys() & self._running.keys(), "a request waits and runs"
        assert {**waiting, **self._running} == self._requests, "a request neither waits nor runs"
        assert self._running.keys() <= self._known_to_runner <= self._requests.keys(), "the runner knows others"
        num_swapped = sum(request.status is RequestStatus.SWAPPED for request in waiting.values())
        assert self.kv.num_holders == len(self._running) + num_swapped, "blocks are held by requests that do not run"
        for request in self._requests.values():
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        running = request.request_id in self._running
        assert running == (request.status is RequestStatus.RUNNING), f"{request} has the wrong status"
        assert 0 <= request.num_computed_tokens <= request.num_tokens + request.num_pending_tokens, f"{request}"
        in_flight = [share for _, shares in self._in_flight for share in shares if share[0] is request]
        assert request.num_steps_in_flight == len(in_flight), f"{request} miscounts steps in flight"
        num_pending = sum(1 + len(share.draft_token_ids) for _, share, _ in in_flight if share.samples)
        assert request.num_pending_tokens == num_pending, f"{request} miscounts pending tokens"
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            assert request.num_computed_tokens == 0, f"{request} waits with computed tokens"

    # Running requests

    def _schedule_running(self, step: StepBuilder) -> None:
        """Gives each running request with one token to compute that token, and collects those with more."""
        num_left = len(self._running)
        for request in list(self._running.values()):
            num_left -= 1
            num_tokens = len(request.all_token_ids) + request.num_pending_tokens
            remaining = num_tokens - request.num_computed_tokens
            if remaining > 1:
                step.prompts.append(request)
            elif remaining == 1 and self._may_decode(request, num_tokens):
                self._grow(request, step, 1, self._drafts(request, num_tokens, step.budget - 1 - num_left))
        step.prompts = sorted((r for r in step.prompts if r.status is RequestStatus.RUNNING), key=self._key)
        step.prompt_budget = step.budget

    def _may_decode(self, request: Request, num_tokens: int) -> bool:
        return (
            request.status is RequestStatus.RUNNING  # not preempted a moment ago by one before it in this step
            and num_tokens < token_limit(request)
            and not request.num_drafts_in_flight
        )

    def _drafts(self, request: Request, num_tokens: int, budget: int) -> Sequence[int]:
        drafts = request.draft_token_ids
        if drafts:
            request.draft_token_ids = ()
            drafts = drafts[: max(0, min(budget, token_limit(request) - num_tokens - 1))]
        return drafts

    def _grow(self, request: Request, step: StepBuilder, num_tokens: int, drafts: Sequence[int] = ()) -> None:
        """Schedules a running request, with fewer tokens where blocks are scarce, preempting where there are none."""
        while (block_ids := self.kv.allocate_slots(request, num_tokens + len(drafts))) is None:
            fitting = self.kv.num_fitting_tokens(request)
            if drafts:
                drafts = ()
            elif 0 < fitting < num_tokens and self.config.enable_chunked_prefill:
                num_tokens = fitting
            elif not self._make_room(request, step):
                return
        step.add(request, num_tokens, block_ids, drafts)

    def _make_room(self, request: Request, step: StepBuilder) -> bool:
        """Preempts the request that is last in order; False where the request itself must wait."""
        victim = max(self._running.values(), key=self._key)
        if victim is request and len(self._running) == 1:
            # Alone it fits (add_request saw to that) once the steps in flight have given back what left its window.
            assert request.num_steps_in_flight, f"{request} has the pool for itself and does not fit"
            return False
        step.lacks_blocks = True
        self._preempt(victim, step)
        return victim is not request

    def _preempt(self, victim: Request, step: StepBuilder) -> None:
        """Sends a running request back to the queue. Tokens in flight for it arrive in `update`."""
        assert not any(new.request_id == victim.request_id for new in step.output.new_requests), f"{victim} just began"
        step.remove(victim)
        del self._running[victim.request_id]
        pairs = self.kv.swap_out(victim) if self.config.preemption_mode == "swap" else None
        if pairs is not None:
            step.output.swap_out.extend(pairs)
            victim.status = RequestStatus.SWAPPED
        else:
            self.kv.free(victim)
            victim.num_computed_tokens = 0
            victim.num_restarts += 1
            victim.status = RequestStatus.PREEMPTED
        victim.draft_token_ids = ()
        victim.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._drop(victim)
        self._waiting.add(victim)

    def _force_preemption(self, step: StepBuilder) -> None:
        """Preempts one request that gained a token since it began to run: only such can be preempted without end."""
        gained = [
            request
            for request in self._running.values()
            if request.num_output_tokens + request.num_pending_tokens > request.num_output_at_start
        ]
        if gained:
            self._preempt(max(gained, key=self._key), step)

    # Prompts, running and waiting

    def _schedule_prompts(self, step: StepBuilder) -> None:
        """Shares what decodes left: short prompts in order, besides one long prompt that takes at most half.

        Further long prompts get what is left after that.
        """
        num_waiting = len(self._waiting) if len(self._running) < self._max_running else 0
        step.contended = len(step.prompts) + num_waiting > 1
        deferred = []
        for request in list(step.prompts):
            if step.has_long and self._is_long(_remaining(request)):
                deferred.append(request)
            else:
                self._grow_prompt(request, step)
        self._admit(step, more_long=False)
        for request in deferred:
            self._grow_prompt(request, step, may_preempt=False)
        if step.has_long:
            self._admit(step, more_long=True)

    def _grow_prompt(self, request: Request, step: StepBuilder, *, may_preempt: bool = True) -> None:
        """Schedules a chunk of a running prompt. Once requests were started in a step, nothing is preempted in it."""
        if request.status is not RequestStatus.RUNNING:
            return
        num_tokens = self._chunk(_remaining(request), step)
        if not may_preempt:
            num_tokens = min(num_tokens, self.kv.num_fitting_tokens(request))
        if num_tokens:
            self._grow(request, step, num_tokens)

    def _is_long(self, remaining: int) -> bool:
        return self.config.enable_chunked_prefill and remaining > self._long_threshold

    def _chunk(self, remaining: int, step: StepBuilder) -> int:
        """Tokens of a prompt to compute in this step; 0 where the budget forbids any."""
        if not self.config.enable_chunked_prefill:
            return remaining if remaining <= step.budget else 0
        limit = step.budget
        if self._is_long(remaining):
            step.has_long = True
            if step.contended:
                limit = min(limit, self._long_threshold, (step.prompt_budget + 1) // 2)
        return min(remaining, limit)

    def _admit(self, step: StepBuilder, *, more_long: bool) -> None:
        """Starts waiting requests in order until budget, places or blocks end.

        A request that lacks blocks holds up those behind it, else small ones would keep it waiting forever.
        """
        started: list[Request] = []
        for request in self._waiting:
            if step.budget <= 0 or step.lacks_blocks or len(self._running) >= self._max_running:
                break
            if request.num_pending_tokens:
                continue  # what it sampled before it was preempted is on its way
            hit = None if request.status is RequestStatus.SWAPPED else self.kv.get_computed_blocks(request)
            remaining = request.num_tokens - (request.num_computed_tokens if hit is None else hit.num_tokens)
            if step.has_long and not more_long and self._is_long(remaining):
                continue
            if not self._start(request, hit, self._chunk(remaining, step), step):
                break
            started.append(request)
        for request in started:
            self._waiting.remove(request)

    def _start(self, request: Request, hit: PrefixHit | None, num_tokens: int, step: StepBuilder) -> bool:
        """Starts or resumes a request with up to `num_tokens` tokens; False, and nothing changed, if it must wait."""
        reserved = sum(self.kv.num_outstanding_blocks(prompt) for prompt in step.prompts)
        if not num_tokens or not self.kv.can_admit(request, hit, reserved):
            return False
        if not (self._restore(request, step) if hit is None else self._take_hit(request, hit, num_tokens)):
            return False
        if self.config.enable_chunked_prefill:
            num_tokens = min(num_tokens, self.kv.num_fitting_tokens(request, hit))
        block_ids = self.kv.allocate_slots(request, num_tokens, hit)
        assert block_ids is not None and num_tokens > 0, f"{request} was admitted and does not fit"
        self._note_start(request, step)
        step.add_new(request, self.kv.block_ids(request))
        step.add(request, num_tokens, tuple([] for _ in block_ids))
        if _remaining(request) > 0:
            step.prompts.append(request)
        return True

    def _restore(self, request: Request, step: StepBuilder) -> bool:
        """Gives a swapped-out request device blocks again, where there are enough."""
        pairs = self.kv.swap_in(request)
        step.output.swap_in.extend(pairs or ())
        return pairs is not None

    def _take_hit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """Starts a request behind its prefix hit, unless it must be computed in one step and cannot."""
        request.num_computed_tokens = hit.num_tokens
        if self.config.enable_chunked_prefill or self.kv.num_fitting_tokens(request, hit) >= num_tokens:
            return True
        request.num_computed_tokens = 0
        return False

    def _note_start(self, request: Request, step: StepBuilder) -> None:
        request.status = RequestStatus.RUNNING
        request.num_output_at_start = request.num_output_tokens
        self._running[request.request_id] = request
        self._known_to_runner.add(request.request_id)
        if request.scheduled_time is None:
            request.scheduled_time = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            self._stats.prefix_cache_queries += request.num_prompt_tokens
            self._stats.prefix_cache_hits += request.num_cached_tokens

    # Ends

    def _end(self, request_id: str, reason: FinishReason) -> bool:
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason)
        return True

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Takes a request out of everything. Only the records of steps in flight still know it."""
        if request.status is RequestStatus.RUNNING:
            del self._running[request.request_id]
        else:
            self._waiting.remove(request)
        self.kv.free(request)
        self._drop(request)
        self._report.forget(request)
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def _drop(self, request: Request) -> None:
        if request.request_id in self._known_to_runner:
            self._known_to_runner.remove(request.request_id)
            self._dropped.append(request.request_id)

    def _count_step(self, output: SchedulerOutput) -> None:
        if not output.empty:
            self._next_step_id += 1
        if output.scheduled:
            self._stats.num_steps += 1
            self._stats.iteration_tokens = output.num_scheduled_tokens


def _remaining(request: Request) -> int:
    return request.num_tokens + request.num_pending_tokens - request.num_computed_tokens
