"""When a request has said enough."""

from __future__ import annotations

from core.outputs import FinishReason
from core.request import Request

__all__ = ["check_finish", "token_limit"]


def token_limit(request: Request) -> int:
    """Tokens, known and pending, at which nothing more is to be computed for the request."""
    return request.num_prompt_tokens + (request.max_tokens or 1)


def check_finish(request: Request) -> FinishReason | None:
    """Why the request ends with its last token, or None where it goes on; sets `stop_reason`.

    `min_tokens` counts output tokens before the one that stops. Stop strings are not seen here: text is made
    outside the engine.
    """
    params = request.sampling_params
    token_ids = request.all_token_ids
    token_id = token_ids[-1]
    num_output = len(token_ids) - request.num_prompt_tokens
    if num_output > params.min_tokens:
        if token_id in params.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token_id in params.stop_token_ids:
            request.stop_reason = token_id
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= request.max_tokens else None
