"""What comes out: plain values that cross the process boundary (msgspec) or reach the user."""

from __future__ import annotations

import enum

import msgspec

__all__ = [
    "CompletionOutput",
    "EngineOutput",
    "EngineStats",
    "FinishReason",
    "Logprob",
    "PositionLogprobs",
    "RequestMetrics",
    "RequestOutput",
]


class FinishReason(enum.StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one candidate. `rank` is 1 for the most likely one."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Candidates at one position, as parallel tuples: the actual token first, then the top ones in order of rank."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    actual_rank: int
    """Rank of `token_ids[0]`, counted from 1 over the whole vocabulary."""


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one engine request (one choice) after a step. Token ids only; text is made outside the engine."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    new_logprobs: tuple[PositionLogprobs, ...] = ()
    """One entry a new token where the request asked for logprobs, else empty."""
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    """Sent once, with the first output, where asked for; entry 0 is None."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or the stop string that ended the choice."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the request was first scheduled."""
    error: str | None = None
    scheduled_time: float | None = None
    """`time.time()` of the first schedule; sent with the first output."""
    num_preemptions: int = 0


class EngineStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Gauges and monotonic counters of the engine, sent with outputs; /metrics is made of them."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use by requests, in [0, 1]."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    num_steps: int = 0
    iteration_tokens: int = 0
    """Tokens scheduled in the last step."""


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Times of one request, seconds since the epoch; None where not reached."""

    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of a request. With `output_kind` delta, text, token_ids and logprobs hold only what is new."""

    index: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """Why, where `finish_reason` is ERROR."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request with its choices, as `LLM.generate` and `AsyncEngine.generate` give it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
