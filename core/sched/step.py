"""One step while it is put together."""

from __future__ import annotations

from collections.abc import Sequence

from core.request import Request
from core.sched.output import NewRequest, ScheduledRequest, SchedulerOutput

__all__ = ["Share", "StepBuilder"]

Share = tuple[Request, ScheduledRequest, int]
"""A request, its share of a step, and the request's `num_restarts` when the step was scheduled."""


class StepBuilder:
    """Collects the shares of a step and keeps the requests' counts in line with them.

    Args:
        output: The step, filled by `finish`.
        budget: Tokens that the step may hold.
    """

    def __init__(self, output: SchedulerOutput, budget: int) -> None:
        self.output = output
        self.budget = budget
        """Tokens that can still be scheduled."""
        self.prompts: list[Request] = []
        """Running requests with more than one token to compute, in order."""
        self.prompt_budget = 0
        """Tokens that were left for `prompts` and waiting requests."""
        self.contended = False
        """Whether several requests want that budget."""
        self.has_long = False
        """Whether a long prompt has got its share."""
        self.bound: int | None = None
        """Tokens of prompts that the step may hold for the sake of those that generate; None for any number."""
        self.lenient = False
        """Whether short prompts may pass that bound."""
        self.lacks_blocks = False
        """Whether a request was preempted because the pool ran out."""
        self._shares: dict[str, Share] = {}

    @property
    def num_shares(self) -> int:
        """Requests that have a share of the step."""
        return len(self._shares)

    def prompt_room(self, *, short: bool) -> int:
        """Tokens that prompts may still take; `short` ones may pass the bound in a lenient step."""
        if self.bound is None or (short and self.lenient):
            return self.budget
        return min(self.budget, self.bound - (self.prompt_budget - self.budget))

    def add(
        self,
        request: Request,
        num_tokens: int,
        new_block_ids: tuple[list[int], ...],
        draft_token_ids: Sequence[int] = (),
    ) -> None:
        """Schedules the next `num_tokens` tokens of a request, and then its drafts."""
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == len(request.all_token_ids) + request.num_pending_tokens and request.max_tokens > 0
        num_drafts = len(draft_token_ids)
        num_scheduled = num_tokens + num_drafts
        share = ScheduledRequest(
            request_id=request.request_id,
            num_computed_tokens=start,
            num_scheduled_tokens=num_scheduled,
            new_block_ids=new_block_ids,
            draft_token_ids=draft_token_ids,
            samples=samples,
        )
        self._shares[request.request_id] = (request, share, request.num_restarts)
        request.num_computed_tokens = start + num_scheduled
        request.num_steps_in_flight += 1
        if samples:
            request.num_drafts_in_flight += num_drafts
            request.num_pending_tokens += 1 + num_drafts
        self.budget -= num_scheduled

    def remove(self, request: Request) -> None:
        """Undoes `add` for a request that lost its place; no effect where it has no share."""
        found = self._shares.pop(request.request_id, None)
        if found is None:
            return
        share, num_drafts = found[1], len(found[1].draft_token_ids)
        request.num_computed_tokens = share.num_computed_tokens
        request.num_steps_in_flight -= 1
        if share.samples:
            request.num_drafts_in_flight -= num_drafts
            request.num_pending_tokens -= 1 + num_drafts
        self.budget += share.num_scheduled_tokens

    def add_new(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        """Tells the runner of a request that it does not know."""
        self.output.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.all_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                block_ids=block_ids,
                adapter=request.adapter,
            )
        )

    def finish(self) -> list[Share]:
        """Fills the output's `scheduled`, requests with one token first, and returns the shares."""
        shares = list(self._shares.values())
        scheduled = [share[1] for share in shares]
        total = sum([share.num_scheduled_tokens for share in scheduled])
        if total > len(scheduled):
            scheduled.sort(key=lambda share: share.num_scheduled_tokens > 1)
        self.output.scheduled = scheduled
        self.output.num_scheduled_tokens = total
        return shares
