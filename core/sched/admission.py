"""Which requests can never be served, told at once and with the numbers."""

from __future__ import annotations

from core.config import SchedulerConfig
from core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from core.request import EngineRequest

__all__ = ["check_lengths", "check_queue"]


def check_lengths(source: EngineRequest, max_model_len: int, capacity_tokens: int) -> None:
    """Refuses a request whose prompt or output can never fit.

    Args:
        source: The request.
        max_model_len: Longest sequence, prompt and output.
        capacity_tokens: Most tokens that one request can have in the KV pool.

    Raises:
        InvalidRequestError: for an empty prompt.
        ContextLengthError: where context window or pool are too small; says what is needed and what there is.
    """
    num_prompt, params = len(source.prompt_token_ids), source.sampling_params
    if not num_prompt:
        raise InvalidRequestError("the prompt has no tokens; give at least one", param="prompt")
    num_output = params.max_tokens if params.max_tokens is not None else max(params.min_tokens, 1)
    num_needed = num_prompt + num_output
    if num_needed > max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_prompt} tokens and {num_output} output tokens are asked for, {num_needed} in all; "
            f"the context window holds {max_model_len}; shorten the prompt or lower max_tokens"
        )
    if num_prompt > capacity_tokens:
        raise ContextLengthError(
            f"the prompt needs {num_prompt} tokens of KV cache and the whole pool holds {capacity_tokens} for one "
            "request; shorten the prompt or give the KV cache more memory"
        )


def check_queue(num_waiting: int, config: SchedulerConfig) -> None:
    """Refuses a request when as many wait as may wait.

    Raises:
        QueueFullError: with the numbers.
    """
    if 0 < config.max_num_queued_reqs <= num_waiting:
        raise QueueFullError(
            f"{num_waiting} requests wait and at most {config.max_num_queued_reqs} may; "
            "retry later or raise --max-num-queued-reqs"
        )
