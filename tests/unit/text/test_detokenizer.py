"""Streaming text: whole characters only, the same text as at once, nothing of the prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidRequestError
from core.sampling_params import SamplingParams
from core.text.detokenizer import IncrementalDetokenizer, logprob_keys, logprob_text
from core.text.output_decoder import OutputDecoder
from core.text.tokenizer import Tokenizer

MakeTokenizer = Callable[..., Tokenizer]


def _stream(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push([token_id]) for token_id in output), detokenizer.finish()]


def test_an_emoji_over_two_tokens_is_shown_once_and_whole(byte_level: MakeTokenizer) -> None:
    """H001: bytes of one character arrive in two tokens."""
    tokenizer = byte_level([b"ob ", b"\xf0\x9f", b"\x98\x8a", b" ke"])
    deltas = _stream(tokenizer, [65], [256, 257, 258, 259])
    assert deltas == ["ob ", "", "😊", " ke", ""]


def test_half_a_character_at_the_end_is_one_replacement(byte_level: MakeTokenizer) -> None:
    """H001, the output ends early: one U+FFFD, at the end, with and without streaming."""
    tokenizer = byte_level([b"ob ", b"\xf0\x9f"])
    assert _stream(tokenizer, [65], [256, 257]) == ["ob ", "", "\ufffd"]
    assert tokenizer.decode([256, 257]) == "ob \ufffd"


def test_a_prompt_that_ends_in_half_a_character_does_not_leak(byte_level: MakeTokenizer) -> None:
    """H002: the output completes the prompt's character and shows nothing else of the prompt."""
    tokenizer = byte_level([b"Hello world ", b"\xf0\x9f\x8c", b"\xb6", b" x"])
    assert "".join(_stream(tokenizer, [256, 257], [258, 259])) == "🌶 x"
    assert "".join(_stream(tokenizer, [256, 257], [259])) == " x"
    assert "".join(_stream(tokenizer, [256, 257], [])) == ""
    assert "".join(_stream(tokenizer, [256], [258, 259])) == "\ufffd x"


def test_an_odd_sequence_neither_raises_nor_disturbs(byte_fallback: MakeTokenizer) -> None:
    """H003: an invalid run of bytes and then an ordinary piece; ids that the vocabulary leaves empty."""
    tokenizer = byte_fallback(["▁ok", "x"])
    output = [1 + 0xF0, 1 + 0x9F, 257, 1 + 0x80, 258]
    assert "".join(_stream(tokenizer, [258], output)) == "\ufffd ok\ufffdx"
    assert "".join(_stream(tokenizer, [258], [10**6, -3, 258])) == "x"


def test_special_tokens_are_left_out_or_shown(chatml: Tokenizer) -> None:
    end = chatml.token_to_id("<|im_end|>")
    assert end is not None
    assert "".join(_stream(chatml, [65], [66, end, 67])) == "BC"
    for spaces in (True, False):
        shown = IncrementalDetokenizer(chatml, [65], skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert shown.push([66, end, end, 67]) == "B<|im_end|><|im_end|>C"


def test_a_continuation_keeps_its_first_space(byte_fallback: MakeTokenizer) -> None:
    tokenizer = byte_fallback(["▁Paris"], prefix=True)
    assert _stream(tokenizer, [257], [257]) == [" Paris", ""]
    assert _stream(tokenizer, [], [257, 257]) == ["Paris", " Paris", ""]


PIECES = [b"\xf0\x9f", b"\x98\x8a", b" ke", "é".encode(), b"\xe2\x82", b"\xacA", b"\xff\xfe", b"DE"]


@settings(max_examples=200, deadline=None)
@given(
    output=st.lists(st.one_of(st.integers(0, 255), st.integers(256, 265)), max_size=30),
    cuts=st.lists(st.integers(1, 4), max_size=30),
)
def test_joined_deltas_are_the_text_decoded_at_once(
    byte_level: MakeTokenizer, output: list[int], cuts: list[int]
) -> None:
    """H003: any ids, in any portions; a replacement character shows only where bytes are invalid."""
    tokenizer = byte_level(PIECES, special=["<|a|>", "<s>"])
    detokenizer = IncrementalDetokenizer(tokenizer, [65])
    shown, rest = [], list(output)
    for cut in cuts:
        shown.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    shown += [detokenizer.push(rest), detokenizer.finish()]
    data = b"".join(tokenizer.token_bytes(i) for i in output if not tokenizer.is_special(i))
    assert "".join(shown) == data.decode("utf-8", "replace") == tokenizer.decode(output)


def test_fragments_have_distinct_texts(byte_fallback: MakeTokenizer) -> None:
    """H009: three lone fragments of characters and two letters stay five entries."""
    tokenizer = byte_fallback(["a", "b"])
    ids = [1 + 0xF0, 1 + 0x9F, 1 + 0x98, 257, 258]
    assert logprob_keys(tokenizer, ids) == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "a", "b"]
    assert len({tokenizer.token_bytes(i) for i in ids}) == 5
    same_text = [1 + ord("a"), 257]
    assert [logprob_text(tokenizer, i) for i in same_text] == ["a", "a"]
    assert len(set(logprob_keys(tokenizer, same_text))) == 2
    with pytest.raises(InvalidRequestError):
        logprob_text(tokenizer, 10**6)


H004 = [
    ([b"DEF", b"GHI"], "DE", False, "", 1),
    ([b"x DEF", b"GHI"], "DE", False, "x ", 1),
    ([b" is", b" Paris", b"."], "Pari", False, " is ", 2),
    ([b"x DEF"], "DE", True, "x DE", 1),
]


@pytest.mark.parametrize(("pieces", "stop", "include", "text", "steps"), H004)
def test_stop_strings_inside_tokens(
    byte_level: MakeTokenizer, pieces: list[bytes], stop: str, include: bool, text: str, steps: int
) -> None:
    """H004: a stop string that begins or ends inside a token cuts the text there."""
    tokenizer = byte_level(pieces)
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include)
    decoder = OutputDecoder(tokenizer, [65], params)
    shown = "".join(decoder.push([256 + i]) for i in range(len(pieces))) + decoder.finish()
    assert (shown, decoder.num_tokens, decoder.stop_string) == (text, steps, stop)


def test_a_stop_token_counts_and_stays_silent(byte_level: MakeTokenizer) -> None:
    tokenizer = byte_level()
    for include, text in ((False, "AB"), (True, "ABC")):
        decoder = OutputDecoder(tokenizer, [65], SamplingParams(include_stop_str_in_output=include))
        assert decoder.push([65, 66, 67], ends_with_stop_token=True) + decoder.finish() == text
        assert decoder.num_tokens == 3


def test_stop_strings_wait_for_min_tokens(byte_level: MakeTokenizer) -> None:
    decoder = OutputDecoder(byte_level(), [65], SamplingParams(stop=("B",), min_tokens=2))
    assert decoder.push([66, 66, 67, 66, 65]) + decoder.finish() == "BBC"
    assert decoder.num_tokens == 4


def test_without_detokenizing_there_is_no_text(byte_level: MakeTokenizer) -> None:
    decoder = OutputDecoder(byte_level(), [65], SamplingParams(detokenize=False))
    assert decoder.push([65, 66]) + decoder.finish() == ""
    assert decoder.num_tokens == 2
