"""What a step's result means for each request of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.kv import KVCacheManager
from core.outputs import EngineOutput, FinishReason, PositionLogprobs
from core.request import Request, RequestStatus
from core.sched.finish import check_finish
from core.sched.output import ModelRunnerOutput, ScheduledRequest
from core.sched.step import Share

__all__ = ["StepReport"]


class StepReport:
    """Applies results to requests and says what is new.

    Args:
        kv: Told which tokens are computed and known.
        finish: Called once for a request that ends.
    """

    def __init__(self, kv: KVCacheManager, finish: Callable[[Request, FinishReason], None]) -> None:
        self._kv = kv
        self._block_size = kv.block_size
        self._finish = finish
        self._prompt_logprobs: dict[str, list[PositionLogprobs | None]] = {}

    def take(self, share: Share, result: ModelRunnerOutput) -> EngineOutput | None:
        """News of one request, or None where there are none or nobody waits for them any more."""
        request, scheduled, num_restarts = share
        request.num_steps_in_flight -= 1
        if scheduled.samples:
            num_drafts = len(scheduled.draft_token_ids)
            request.num_drafts_in_flight -= num_drafts
            request.num_pending_tokens -= 1 + num_drafts
        if request.status is RequestStatus.FINISHED:
            return None
        token_ids: Sequence[int] = result.sampled_token_ids.get(scheduled.request_id, ())
        num_sampled = len(token_ids)
        if result.errors or num_sampled != scheduled.samples:
            error = _find_error(request, scheduled, num_sampled, result)
            if error is not None:
                self._finish(request, FinishReason.ERROR)
                return EngineOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error)
        first = len(request.all_token_ids) == request.num_prompt_tokens
        if first and result.prompt_logprobs:
            self._collect_prompt_logprobs(request, result)
        if num_sampled == 1:  # what nearly every request of nearly every step does
            request.all_token_ids.append(token_ids[0])
            num_new, reason = 1, check_finish(request)
        else:
            num_new, reason = _append(request, token_ids)
        if num_restarts == request.num_restarts:
            # A single token that fills no block changes nothing that is kept here.
            advances = scheduled.num_scheduled_tokens > 1 or (scheduled.num_computed_tokens + 1) % self._block_size == 0
            if (advances or not request.max_tokens) and self._advance(request, scheduled, num_sampled):
                reason = FinishReason.LENGTH
        if not num_new and reason is None:
            return None
        return self._news(request, token_ids[:num_new], reason, first, result)

    def forget(self, request: Request) -> None:
        """Drops what was collected for a request."""
        self._prompt_logprobs.pop(request.request_id, None)

    def _advance(self, request: Request, scheduled: ScheduledRequest, num_sampled: int) -> bool:
        """Takes back rejected drafts and caches what is certain; whether a request without output is done with that."""
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        if scheduled.draft_token_ids:
            num_rejected = len(scheduled.draft_token_ids) + 1 - num_sampled
            request.num_computed_tokens -= num_rejected
            end -= num_rejected
        if scheduled.num_scheduled_tokens > 1 or end % self._block_size == 0:
            self._kv.cache_blocks(request, min(end, request.num_tokens))
        return request.max_tokens == 0 and end == request.num_tokens

    def _news(
        self,
        request: Request,
        token_ids: Sequence[int],
        reason: FinishReason | None,
        first: bool,
        result: ModelRunnerOutput,
    ) -> EngineOutput:
        news = EngineOutput(
            request_id=request.request_id,
            new_token_ids=tuple(token_ids),
            finish_reason=reason,
            stop_reason=request.stop_reason,
            num_preemptions=request.num_preemptions,
        )
        if result.logprobs:
            news.new_logprobs = tuple(result.logprobs.get(request.request_id, ())[: len(token_ids)])
        if first:
            news.num_cached_tokens = request.num_cached_tokens
            news.scheduled_time = request.scheduled_time
            if request.sampling_params.prompt_logprobs is not None:
                news.prompt_logprobs = tuple(self._prompt_logprobs.pop(request.request_id, [None]))
        if reason is not None:
            self._finish(request, reason)
        return news

    def _collect_prompt_logprobs(self, request: Request, result: ModelRunnerOutput) -> None:
        """Puts a chunk's entries where they belong; a recomputed chunk overwrites itself."""
        part = result.prompt_logprobs.get(request.request_id)
        if part is not None:
            start, entries = part
            collected = self._prompt_logprobs.setdefault(request.request_id, [None] * request.num_prompt_tokens)
            collected[start : start + len(entries)] = entries
            assert len(collected) == request.num_prompt_tokens, f"prompt_logprobs past the prompt of {request}"


def _append(request: Request, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
    """Appends tokens up to the one that ends the request; returns how many, and why it ends."""
    append = request.all_token_ids.append
    for index, token_id in enumerate(token_ids):
        append(token_id)
        reason = check_finish(request)
        if reason is not None:
            return index + 1, reason
    return len(token_ids), None


def _find_error(
    request: Request, scheduled: ScheduledRequest, num_tokens: int, result: ModelRunnerOutput
) -> str | None:
    """The runner's reason why the request cannot go on, or ours where it gave too few or too many tokens."""
    if result.errors and request.request_id in result.errors:
        return result.errors[request.request_id]
    most = 1 + len(scheduled.draft_token_ids) if scheduled.samples else 0
    least = 1 if scheduled.samples else 0
    if least <= num_tokens <= most:
        return None
    return f"the runner gave {num_tokens} tokens where {least} to {most} were due; please report this as a bug"
