"""Stop strings in streamed text: found wherever they begin or end, whatever the pieces in which text arrives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from core.errors import InvalidRequestError

__all__ = ["StopChecker"]


@lru_cache(maxsize=256)
def _failures(text: str) -> Sequence[int]:
    """Length of the longest border of each prefix. Kept: the choices of a request look for the same strings."""
    failure = [0] * (len(text) + 1)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = failure[length]
        length += text[index] == text[length]
        failure[index + 1] = length
    return failure


class _Matcher:
    """Knuth-Morris-Pratt automaton of one string; its state is the length of the prefix that the text ends with."""

    __slots__ = ("failure", "state", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self.failure = _failures(text)

    def step(self, char: str) -> bool:
        """Whether the string ends with this character."""
        state = self.state
        if state == len(self.text):
            state = self.failure[state]
        while state and char != self.text[state]:
            state = self.failure[state]
        self.state = state + (char == self.text[state])
        return self.state == len(self.text)


class StopChecker:
    """Cuts a stream of text at the first stop string, and holds back what may become one.

    The first match is the one that ends first; of several that end together, the longest. So the result does not
    depend on how the text was cut into pieces. Costs time in proportion to the text.

    Args:
        stop: Stop strings, none empty.
        include_stop_str_in_output: Cut right after the match, not before it.

    Raises:
        InvalidRequestError: a stop string is empty.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        if not all(stop):
            raise InvalidRequestError("stop must hold non-empty strings, got ''; remove it", param="stop")
        self.include_stop_str_in_output = include_stop_str_in_output
        self.matched: str | None = None
        """The stop string that was found, or None."""
        self._matchers = [_Matcher(text) for text in dict.fromkeys(stop)]
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text that is safe to show after `text` arrived; "" after a match.

        Args:
            armed: Whether a string that ends inside `text` counts (not before `min_tokens`).
        """
        if self.matched is not None:
            return ""
        if not self._matchers:
            return text
        buffer, start = self._held + text, len(self._held)
        for index in range(start, len(buffer)):
            char = buffer[index]
            ended = [matcher.text for matcher in self._matchers if matcher.step(char)]
            if ended and armed:
                return self._cut(buffer[: index + 1], max(ended, key=len))
        hold = max(self._hold_length(matcher) for matcher in self._matchers)
        self._held = buffer[len(buffer) - hold :]
        return buffer[: len(buffer) - hold]

    def finish(self) -> str:
        """Text still held back, at the end of the stream; "" after a match."""
        held, self._held = self._held, ""
        return "" if self.matched is not None else held

    def _cut(self, buffer: str, match: str) -> str:
        self.matched, self._held = match, ""
        return buffer if self.include_stop_str_in_output else buffer[: len(buffer) - len(match)]

    @staticmethod
    def _hold_length(matcher: _Matcher) -> int:
        # A whole match that did not count may still begin another one.
        whole = matcher.state == len(matcher.text)
        return matcher.failure[matcher.state] if whole else matcher.state
