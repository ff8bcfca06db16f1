"""What passes between Scheduler and ModelRunner: plain values, no torch.

The runner keeps a mirror of each request (token ids, block table), so that a step carries only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from core.outputs import PositionLogprobs
from core.sampling_params import SamplingParams

__all__ = ["ModelRunnerOutput", "NewRequest", "ScheduledRequest", "SchedulerOutput"]


@dataclass(slots=True, kw_only=True)
class NewRequest:
    """A request that the runner does not know (yet, or any more: a preempted one comes back as a new one).

    Args:
        token_ids: Prompt and every known output token.
        num_prompt_tokens: How many of them are prompt.
        block_ids: Block table for each cache group; replaces what the runner knew.
    """

    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    adapter: str | None = None


class ScheduledRequest(msgspec.Struct, kw_only=True, gc=False):
    """One request's share of a step: tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    Where the range ends at the request's last token (known, pending or draft), the runner samples.

    Args:
        new_block_ids: Blocks appended to the table of each cache group in this step; empty lists where none.
        draft_token_ids: Draft tokens at the end of the range, to be verified.
        samples: Whether this step samples a token for the request.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[list[int], ...] = ()
    draft_token_ids: Sequence[int] = ()
    samples: bool = False


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """One step.

    Args:
        step_id: Counts from 0.
        new_requests: Requests that the runner must take up first; each is also in `scheduled`.
        scheduled: Every request of the step, those with one token before longer ones.
        num_scheduled_tokens: Their sum; 0 means that the step only carries the lists below.
        dropped_request_ids: Requests that the runner may forget (finished, aborted or preempted), before anything else.
        swap_out: (device block, host block) pairs to copy before the step writes anything.
        swap_in: (host block, device block) pairs to copy after `swap_out` and before the forward.
    """

    step_id: int
    new_requests: list[NewRequest] = field(default_factory=list)
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_scheduled_tokens: int = 0
    dropped_request_ids: list[str] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing at all for the runner to do."""
        return not (self.scheduled or self.dropped_request_ids or self.swap_out or self.swap_in)


@dataclass(slots=True, kw_only=True)
class ModelRunnerOutput:
    """What a step gave. Requests that sampled nothing are not listed.

    Args:
        sampled_token_ids: Request id to the tokens it gained (one, or 1 + accepted drafts).
        logprobs: Request id to one entry for each sampled token, where asked for.
        prompt_logprobs: Request id to (first prompt position covered, entries): position p holds the logprobs of
            prompt token p given those before it; position 0 is never covered.
        errors: Request id to the reason why the runner could not sample for it (every candidate masked, ...).
        draft_token_ids: Request id to what the runner's drafter proposes to follow the tokens above.
    """

    step_id: int
    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[PositionLogprobs]]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
