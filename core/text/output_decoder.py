"""The text of one choice as its tokens come: detokenizing and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence

from core.sampling_params import SamplingParams
from core.text.detokenizer import IncrementalDetokenizer
from core.text.stop_strings import StopChecker
from core.text.tokenizer import Tokenizer

__all__ = ["OutputDecoder"]


class OutputDecoder:
    """Output ids in, text deltas out, until a stop string ends the choice.

    Args:
        tokenizer: Shared, not changed.
        prompt_token_ids: Ids before the output.
        params: `stop`, `include_stop_str_in_output`, `min_tokens`, `detokenize` and the `*_special_tokens` fields
            are read.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._checker = StopChecker(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._params = params
        self.num_tokens = 0
        """Output tokens that count: up to and with the one in which a stop string ended."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the choice, or None."""
        return self._checker.matched

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """Text to show after these ids; ids after a stop string are ignored and not counted.

        Args:
            ends_with_stop_token: The last id ended the choice (EOS or `stop_token_ids`): it counts, and its text is
                shown only with `include_stop_str_in_output`.
        """
        shown = []
        for index, token_id in enumerate(token_ids):
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            silent = ends_with_stop_token and index == len(token_ids) - 1
            if self._params.detokenize and not (silent and not self._params.include_stop_str_in_output):
                armed = self.num_tokens > self._params.min_tokens
                shown.append(self._checker.push(self._detokenizer.push([token_id]), armed=armed))
        return "".join(shown)

    def finish(self) -> str:
        """The rest of the text, when the choice has ended for whatever reason."""
        if not self._params.detokenize:
            return ""
        last = self._checker.push(self._detokenizer.finish(), armed=self.num_tokens > self._params.min_tokens)
        return last + self._checker.finish()
