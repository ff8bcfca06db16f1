"""One request as the engine sees it: token ids in, token ids out, and how far the computation is."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

import msgspec

from core.outputs import FinishReason
from core.sampling_params import SamplingParams

__all__ = ["EngineRequest", "Request", "RequestStatus"]


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request on its way to the engine process; `n` choices arrive as n of these.

    `request_id` is unique inside the engine. An id that a caller chose is a label, never a key.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float = msgspec.field(default_factory=time.time)
    priority: int = 0
    """Lower runs first (vLLM's order); only with `scheduling_policy="priority"`."""
    cache_salt: str | None = None
    adapter: str | None = None
    """Name of a LoRA adapter; part of the prefix-cache key."""
    external_id: str | None = None


class RequestStatus(enum.IntEnum):
    """Where a request is. FINISHED and above hold no blocks."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """In the waiting queue again; its blocks were freed, to be computed anew."""
    SWAPPED = 3
    """In the waiting queue again; its blocks wait in host memory."""
    FINISHED = 4


class Request:
    """Mutable state of one request; owned by the Scheduler.

    `num_computed_tokens` catches up with `num_tokens`; there is no prefill phase and no decode phase.
    Invariant: 0 <= num_computed_tokens <= num_tokens + num_pending_tokens.
    """

    __slots__ = (
        "adapter",
        "all_token_ids",
        "arrival_index",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "draft_token_ids",
        "finish_reason",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_drafts_in_flight",
        "num_output_at_start",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_restarts",
        "num_steps_in_flight",
        "priority",
        "request_id",
        "sampling_params",
        "scheduled_time",
        "status",
        "stop_reason",
    )

    def __init__(self, source: EngineRequest, max_model_len: int) -> None:
        params = source.sampling_params
        self.request_id = source.request_id
        self.sampling_params = params
        self.all_token_ids: list[int] = list(source.prompt_token_ids)
        """Prompt and known output tokens. Append only."""
        self.num_prompt_tokens = len(source.prompt_token_ids)
        room = max_model_len - self.num_prompt_tokens
        self.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self.arrival_time = source.arrival_time
        self.priority = source.priority
        self.cache_salt = source.cache_salt
        self.adapter = source.adapter
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        """Output tokens that a step in flight will sample, not yet known to the host (asynchronous scheduling)."""
        self.num_cached_tokens = -1
        """Prompt tokens found in the prefix cache at the first schedule; -1 before it."""
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []
        """Chained hash of each full block of `all_token_ids`; extended by the KVCacheManager."""
        self.arrival_index = 0
        """Order of arrival at the Scheduler."""
        self.draft_token_ids: Sequence[int] = ()
        """Draft tokens that the next step may verify."""
        self.num_drafts_in_flight = 0
        """Draft tokens of a step in flight; how many of them count is not known to the host yet."""
        self.num_steps_in_flight = 0
        """Steps scheduled and not yet reported that hold a share of this request."""
        self.num_restarts = 0
        """Times that computed tokens were thrown away; tells reports of steps before from those after."""
        self.num_output_at_start = 0
        """Output tokens when it last began to run."""
        self.scheduled_time: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the known output tokens."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether the request has ended and holds nothing."""
        return self.status >= RequestStatus.FINISHED

    def sort_key(self) -> tuple[int, float, str]:
        """Order under the priority policy: priority, then arrival, then id."""
        return (self.priority, self.arrival_time, self.request_id)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
