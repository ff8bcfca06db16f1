"""Stop strings in streams against a search of the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.text.stop_strings import StopChecker


def _oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first match is the one that ends first, and the longest of those."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            match = max(ended, key=len)
            return text[: end if include else end - len(match)], match
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
)
def test_streamed_text_is_the_text_cut_at_once(pieces: list[str], stops: list[str], include: bool) -> None:
    checker = StopChecker(stops, include_stop_str_in_output=include)
    shown = "".join(checker.push(piece) for piece in pieces) + checker.finish()
    assert (shown, checker.matched) == _oracle("".join(pieces), stops, include)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text("ab", max_size=3), max_size=10), stop=st.text("ab", min_size=1, max_size=4))
def test_nothing_shown_is_ever_taken_back(pieces: list[str], stop: str) -> None:
    checker = StopChecker([stop])
    shown = ""
    for end, piece in enumerate(pieces, 1):
        shown += checker.push(piece)
        assert _oracle("".join(pieces[:end]), [stop], False)[0].startswith(shown)


def test_text_that_cannot_become_a_stop_string_is_shown_at_once() -> None:
    checker = StopChecker(["STOP"])
    assert checker.push("abcS") == "abc"
    assert checker.push("x") == "Sx"
    assert checker.push("ST") == ""
    assert checker.finish() == "ST"


def test_after_a_match_nothing_follows() -> None:
    checker = StopChecker(["X"])
    assert checker.push("aXb") == "a"
    assert checker.push("more") == ""
    assert checker.finish() == ""
    assert checker.matched == "X"


def test_a_match_before_it_counts_is_text() -> None:
    checker = StopChecker(["aa"])
    assert checker.push("aa", armed=False) == "a"
    assert checker.push("a") + checker.finish() == ""
    assert checker.matched == "aa"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop"):
        StopChecker(["a", ""])


def test_cost_grows_with_the_text_and_not_its_square() -> None:
    stop = "a" * 2000 + "b"
    checker = StopChecker([stop])
    start = time.process_time()
    for _ in range(20_000):
        checker.push("aaaa")
    assert time.process_time() - start < 10.0


def test_many_choices_with_long_stop_strings_begin_at_once() -> None:
    stops = [f"{number}" + "ab" * 500_000 for number in range(4)]
    StopChecker(stops)
    begin = time.perf_counter()
    for _ in range(128):
        StopChecker(stops)
    assert time.perf_counter() - begin < 1.0
