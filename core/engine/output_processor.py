"""From EngineOutputs (token ids of single choices) to RequestOutputs (text, choices merged, times)."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from core.engine.choice import Choice
from core.engine.input_processor import ProcessedRequest
from core.outputs import EngineOutput, FinishReason, PositionLogprobs, RequestMetrics, RequestOutput

if TYPE_CHECKING:
    from core.text.tokenizer import Tokenizer

__all__ = ["OutputKind", "OutputProcessor"]

logger = logging.getLogger("core.engine")


class OutputKind(enum.StrEnum):
    """What each RequestOutput of a request holds."""

    DELTA = "delta"
    """Only the choices that have news, and of those only what is new."""
    CUMULATIVE = "cumulative"
    """Every choice, with everything so far."""
    FINAL_ONLY = "final_only"
    """One output at the end, with everything."""


class OutputProcessor:
    """Keeps the outgoing half of every request in flight. Forgets a request when its last choice ends.

    Args:
        tokenizer: None leaves all text empty.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[str, _RequestState] = {}
        self._choices: dict[str, tuple[_RequestState, Choice]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: ProcessedRequest, kind: OutputKind) -> None:
        """Makes room for the outputs of a request; before its first can come."""
        state = _RequestState(request, kind, self._tokenizer)
        self._requests[request.key] = state
        for choice in state.choices:
            self._choices[choice.engine_id] = (state, choice)

    def process(self, outputs: Sequence[EngineOutput]) -> tuple[list[tuple[str, RequestOutput]], list[str]]:
        """Takes the news of a step; ids that are not known (any more) are passed over.

        Returns:
            (key, output) for each request with something to say, and the engine ids of choices that a stop string
            ended, which the engine must abort.
        """
        now = time.time()
        touched: dict[str, _RequestState] = {}
        to_abort: list[str] = []
        for output in outputs:
            state, choice = self._choices.get(output.request_id, (None, None))
            if state is None or choice is None:
                continue
            touched[state.request.key] = state
            if _take(state, choice, output, now):
                to_abort.append(choice.engine_id)
            if choice.finished:
                del self._choices[choice.engine_id]
                state.num_open -= 1
        news = [(key, told) for key, state in touched.items() if (told := state.tell(now)) is not None]
        for key, state in touched.items():
            if state.finished:
                del self._requests[key]
        return news, to_abort

    def keys_of(self, request_id: str) -> list[str]:
        """Keys of the requests in flight with this label."""
        return [key for key, state in self._requests.items() if state.request.request_id == request_id]

    def abort(self, key: str) -> tuple[RequestOutput, list[str]]:
        """Ends a request with FinishReason.ABORT: its last output, and the engine ids that must be aborted.

        Raises:
            KeyError: no request in flight has this key.
        """
        state = self._requests[key]
        running = self.discard(key)
        for choice in state.choices:
            choice.finish(FinishReason.ABORT)
        state.num_open = 0
        last = state.tell(time.time())
        assert last is not None, "a request that was in flight has an end to tell"
        return last, running

    def discard(self, key: str) -> list[str]:
        """Forgets a request without a word; the engine ids that were still running. Unknown keys give none."""
        state = self._requests.pop(key, None)
        if state is None:
            return []
        running = [choice.engine_id for choice in state.choices if not choice.finished]
        for engine_id in running:
            del self._choices[engine_id]
        return running


class _RequestState:
    """The outgoing half of one request."""

    def __init__(self, request: ProcessedRequest, kind: OutputKind, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.choices = [Choice(request, index, tokenizer) for index in range(len(request.choices))]
        self.num_open = len(self.choices)
        """Choices that have not ended."""
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._kind = kind

    @property
    def finished(self) -> bool:
        return self.num_open == 0

    def note(self, choice: Choice, output: EngineOutput, now: float) -> None:
        """Takes what an output says of the request as a whole."""
        metrics = self.metrics
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = list(output.prompt_logprobs)
        if output.scheduled_time is not None and metrics.scheduled_time is None:
            metrics.scheduled_time = output.scheduled_time
        if choice.index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        metrics.num_preemptions = max(metrics.num_preemptions, output.num_preemptions)
        if output.new_token_ids:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now

    def tell(self, now: float) -> RequestOutput | None:
        """The next RequestOutput of the request's kind; None where there is nothing to tell yet."""
        if self.finished:
            self.metrics.finished_time = now
        if self._kind is OutputKind.FINAL_ONLY and not self.finished:
            return None
        if self._kind is OutputKind.DELTA:
            outputs = [choice.take_delta() for choice in self.choices if choice.has_news]
        else:
            outputs = [choice.snapshot() for choice in self.choices]
        if not outputs:
            return None
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


def _take(state: _RequestState, choice: Choice, output: EngineOutput, now: float) -> bool:
    """Hands the output on; whether the engine must be told to stop. One odd request must not end the loop of all."""
    state.note(choice, output, now)
    try:
        return choice.take(output)
    except Exception as error:
        logger.exception("the output of request %s could not be processed", state.request.request_id)
        choice.give_up(f"its output could not be turned into text ({type(error).__name__}: {error})")
        return output.finish_reason is None
