"""One choice of a request on its way out: token ids become text, stop strings end it, news is collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.engine.input_processor import ProcessedRequest
from core.outputs import CompletionOutput, EngineOutput, FinishReason, PositionLogprobs
from core.text.output_decoder import OutputDecoder

if TYPE_CHECKING:
    from core.text.tokenizer import Tokenizer

__all__ = ["Choice"]


class Choice:
    """What one choice has said so far. Text lags behind tokens: half a character and what may become a stop string
    are held back until it is known what they are.

    Args:
        request: The request that it belongs to.
        index: Its index among the choices.
        tokenizer: None leaves the text empty.
    """

    def __init__(self, request: ProcessedRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.choices[index].sampling_params
        self.index = index
        self.engine_id = request.choices[index].request_id
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._decoder = None if tokenizer is None else OutputDecoder(tokenizer, request.prompt_token_ids, params)
        self._logprobs_asked = params.logprobs is not None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._told_texts = 0
        self._told_tokens = 0
        self._told_finish = False

    @property
    def finished(self) -> bool:
        """Whether nothing can follow."""
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` would hold anything."""
        told_all = self._told_texts == len(self._texts) and self._told_tokens == len(self._token_ids)
        return not told_all or self.finished is not self._told_finish

    def take(self, output: EngineOutput) -> bool:
        """Takes the news of a step; whether a stop string ended the choice, which the engine does not know yet.

        Tokens after the one that completed the stop string are dropped: they were never said.
        """
        last = len(output.new_token_ids) - 1
        for position, token_id in enumerate(output.new_token_ids):
            logprobs = output.new_logprobs[position] if output.new_logprobs else None
            self._take_token(token_id, logprobs, ends=position == last and output.finish_reason is FinishReason.STOP)
            if self.finished:
                return output.finish_reason is None
        if output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason, output.error)
        return False

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """Ends the choice and lets out the text that was held back. Only the first end counts."""
        if self.finished:
            return
        if self._decoder is not None:
            self._add_text(self._decoder, self._decoder.finish())
        if not self.finished:
            self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def give_up(self, error: str) -> None:
        """Ends the choice with an error, its text as it stands."""
        self.finish_reason, self.stop_reason, self.error = FinishReason.ERROR, None, error

    def take_delta(self) -> CompletionOutput:
        """What is new since the last call."""
        told = self._told_tokens
        output = self._output(self._texts[self._told_texts :], self._token_ids[told:], self._logprobs[told:])
        self._told_texts, self._told_tokens = len(self._texts), len(self._token_ids)
        self._told_finish = self.finished
        return output

    def snapshot(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(self._texts, list(self._token_ids), list(self._logprobs))

    def _take_token(self, token_id: int, logprobs: PositionLogprobs | None, *, ends: bool) -> None:
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs.logprobs[0]
        if self._decoder is not None:
            self._add_text(self._decoder, self._decoder.push((token_id,), ends_with_stop_token=ends))

    def _add_text(self, decoder: OutputDecoder, text: str) -> None:
        if text:
            self._texts.append(text)
        if decoder.stop_string is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, decoder.stop_string

    def _output(self, texts: list[str], token_ids: list[int], logprobs: list[PositionLogprobs]) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(texts),
            token_ids=token_ids,
            logprobs=logprobs if self._logprobs_asked else None,
            cumulative_logprob=self._cumulative_logprob if self._logprobs_asked else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )
