"""What the outputs of a request add up to: choices and usage."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from core.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput
from core.serve.errors import ApiError

__all__ = ["Choice", "Usage", "check_finish", "collect"]


class Usage:
    """Token counts of a request: prompts counted once, completion tokens summed over choices."""

    __slots__ = ("_prompts", "completion_tokens")

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Counts what `output` brings."""
        if prompt_index not in self._prompts:
            self._prompts[prompt_index] = (len(output.prompt_token_ids), max(output.num_cached_tokens, 0))
        for choice in output.outputs:
            self.completion_tokens += len(choice.token_ids)

    @staticmethod
    def start(output: RequestOutput) -> dict[str, Any]:
        """The `usage` object before the first token of a single prompt."""
        usage = Usage()
        usage.add(0, output)
        usage.completion_tokens = 0
        return usage.json()

    def json(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt_tokens = sum(count for count, _ in self._prompts.values())
        cached_tokens = sum(cached for _, cached in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class Choice:
    """One choice put together from its deltas."""

    __slots__ = ("finish_reason", "index", "logprobs", "output", "stop_reason", "text", "token_ids")

    def __init__(self, index: int, output: RequestOutput) -> None:
        self.index = index
        self.output = output
        """The first output of its prompt that was seen; has the prompt's ids and logprobs."""
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: CompletionOutput) -> None:
        """Appends what is new.

        Raises:
            ApiError: 500, where the engine could not go on with this choice.
        """
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            check_finish(delta)
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


def check_finish(delta: CompletionOutput) -> None:
    """Raises ApiError (500) where the choice ended by an error of the engine."""
    if delta.finish_reason is FinishReason.ERROR:
        reason = delta.error or "the engine could not go on with this request; the server's log has the details"
        raise ApiError(500, reason, kind="server_error", code="engine_error")


async def collect(
    outputs: AsyncGenerator[tuple[int, RequestOutput], None], n: int
) -> tuple[list[Choice], Usage, Sequence[RequestOutput]]:
    """Reads all outputs: choices in order (`prompt index * n + choice index`), usage, each prompt's first output."""
    choices: dict[int, Choice] = {}
    firsts: dict[int, RequestOutput] = {}
    usage = Usage()
    try:
        async for prompt_index, output in outputs:
            usage.add(prompt_index, output)
            first = firsts.setdefault(prompt_index, output)
            if output.prompt_logprobs is not None and first.prompt_logprobs is None:
                first.prompt_logprobs = output.prompt_logprobs
            for delta in output.outputs:
                index = prompt_index * n + delta.index
                if index not in choices:
                    choices[index] = Choice(index, first)
                choices[index].add(delta)
    finally:
        await outputs.aclose()
    return [choices[index] for index in sorted(choices)], usage, [firsts[index] for index in sorted(firsts)]
