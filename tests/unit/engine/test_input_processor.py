"""What is wrong with a request is found before it is scheduled, and what is right with it is complete."""

from __future__ import annotations

from typing import Any

import pytest

from core.engine.input_processor import MAX_REQUEST_ID_LEN, InputProcessor
from core.errors import ContextLengthError, InvalidRequestError
from core.sampling_params import SamplingParams

VOCAB = {
    "exaggerated": [327, 114, 657],
    " exaggerated": [618],
    "five": [5],
    " five": [5],
    "": [],
    " ": [9],
    "hi": [50, 51],
}


class DictTokenizer:
    """Encodes what is listed and nothing else."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = VOCAB["" if text.strip("\x00 ") == "" and "\x00" in text else text]
        return [1, *ids] if add_special_tokens else ids


def processor(**changes: Any) -> InputProcessor:
    arguments: dict[str, Any] = {"vocab_size": 1000, "max_model_len": 64, "max_logprobs": 20, "eos_token_ids": (2, 7)}
    return InputProcessor(DictTokenizer(), **(arguments | changes))  # type: ignore[arg-type]


def refusal(prompt: Any, params: SamplingParams | None = None, **labels: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        processor().process(prompt, params or SamplingParams(), **labels)
    return caught.value


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(65, 1), (60, 10), (64, 1), (64, None), (65, None), (65, 0)])
def test_what_does_not_fit_the_window_is_refused_with_the_numbers(num_prompt: int, max_tokens: int | None) -> None:
    """H012, the steps that get 400."""
    error = refusal([5] * num_prompt, SamplingParams(max_tokens=max_tokens))
    assert isinstance(error, ContextLengthError)
    assert error.code == "context_length_exceeded"
    assert str(num_prompt) in error.message
    assert "64" in error.message
    assert str(num_prompt + (1 if max_tokens is None else max_tokens)) in error.message


@pytest.mark.parametrize(("num_prompt", "max_tokens", "room"), [(8, 4, 4), (60, None, 4), (60, 4, 4), (64, 0, 0)])
def test_what_fits_the_window_is_taken(num_prompt: int, max_tokens: int | None, room: int) -> None:
    """H012, the steps that get 200: no limit means the room that is left."""
    request = processor().process([5] * num_prompt, SamplingParams(max_tokens=max_tokens))
    assert request.choices[0].sampling_params.max_tokens == room


def test_min_tokens_beyond_the_room_is_refused() -> None:
    error = refusal([5] * 60, SamplingParams(max_tokens=None, min_tokens=5))
    assert isinstance(error, ContextLengthError)
    assert "min_tokens" in error.message


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([-1], SamplingParams(), "prompt"),
        ([5, 1000], SamplingParams(), "prompt"),
        (["5"], SamplingParams(), "prompt"),
        ([], SamplingParams(), "prompt"),
        ("hi", SamplingParams(logit_bias={1000: 5.0}), "logit_bias"),
        ("hi", SamplingParams(stop_token_ids=(1000,), min_tokens=1), "stop_token_ids"),
        ("hi", SamplingParams(allowed_token_ids=(1000,)), "allowed_token_ids"),
        ("hi", SamplingParams(logprobs=2_000_000_000), "logprobs"),
        ("hi", SamplingParams(prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_ids_and_counts_outside_the_vocabulary_are_refused_by_name(
    prompt: Any, params: SamplingParams, param: str
) -> None:
    """H013."""
    assert refusal(prompt, params).param == param


def test_bad_words_are_banned_bare_and_after_a_space() -> None:
    """H016 a."""
    request = processor().process("hi", SamplingParams(bad_words=("exaggerated",)))
    assert request.choices[0].sampling_params.bad_words_token_ids == ((327, 114, 657), (618,))


def test_bad_words_may_leave_a_part_of_the_allowlist() -> None:
    """H016 b."""
    request = processor().process("hi", SamplingParams(bad_words=("five",), allowed_token_ids=(5, 6)))
    assert request.choices[0].sampling_params.bad_words_token_ids == ((5,),)


def test_bad_words_that_leave_nothing_of_the_allowlist_are_refused() -> None:
    """H016 c."""
    error = refusal("hi", SamplingParams(bad_words=("five",), allowed_token_ids=(5,)))
    assert error.param == "bad_words"
    assert "allowed_token_ids" in error.message


def test_a_bad_word_without_tokens_is_refused() -> None:
    """H016 d."""
    error = refusal("hi", SamplingParams(bad_words=("\x00",)))
    assert error.param == "bad_words"


def test_eos_ids_are_filled_in_beside_those_of_the_caller() -> None:
    params = processor().process("hi", SamplingParams(stop_token_ids=(13,))).choices[0].sampling_params
    assert (params.eos_token_ids, params.stop_token_ids) == ((2, 7), (13,))


def test_each_choice_has_an_id_and_a_seed_of_its_own() -> None:
    request = processor().process("hi", SamplingParams(n=3, seed=41, prompt_logprobs=1))
    assert [choice.sampling_params.seed for choice in request.choices] == [41, 42, 43]
    assert len({choice.request_id for choice in request.choices}) == 3
    assert [choice.sampling_params.n for choice in request.choices] == [1, 1, 1]
    assert [choice.sampling_params.prompt_logprobs for choice in request.choices] == [1, None, None]


def test_the_largest_seed_wraps_around() -> None:
    request = processor().process("hi", SamplingParams(n=2, seed=2**64 - 1))
    assert [choice.sampling_params.seed for choice in request.choices] == [2**64 - 1, 0]


def test_requests_without_a_seed_draw_different_ones() -> None:
    """H015: what is not seeded differs over repeats, and survives a preemption with the same seed."""
    inputs = processor()
    seeds = {inputs.process("hi", SamplingParams()).choices[0].sampling_params.seed for _ in range(8)}
    assert len(seeds) == 8
    assert None not in seeds


def test_a_seeded_processor_draws_the_same_seeds_again() -> None:
    first, second = (
        [inputs.process("hi", SamplingParams()).choices[0].sampling_params.seed for _ in range(3)]
        for inputs in (processor(seed=3), processor(seed=3))
    )
    assert first == second


def test_equal_labels_make_unequal_ids() -> None:
    """H036: caller ids are labels, never keys."""
    first, second = (processor().process("hi", SamplingParams(), request_id="id") for _ in range(2))
    assert first.request_id == second.request_id == "id"
    assert first.key != second.key
    assert first.choices[0].request_id != second.choices[0].request_id


@pytest.mark.parametrize("label", ["request_id", "external_id"])
def test_a_huge_label_is_refused_by_its_length_alone(label: str) -> None:
    """H036, a 1 MB id."""
    error = refusal("hi", **{label: "x" * 2**20})
    assert error.param == label
    assert str(MAX_REQUEST_ID_LEN) in error.message
    assert len(error.message) < 200


def test_text_without_a_tokenizer_is_refused() -> None:
    inputs = InputProcessor(None, vocab_size=10, max_model_len=8, max_logprobs=1)
    with pytest.raises(InvalidRequestError, match="send ids"):
        inputs.process("hi", SamplingParams(max_tokens=1))
    assert inputs.process([1], SamplingParams(max_tokens=1)).prompt_token_ids == [1]


def test_a_tokens_prompt_is_taken_as_it_is() -> None:
    request = processor().process({"prompt_token_ids": [4, 5]}, SamplingParams())
    assert (request.prompt, request.prompt_token_ids) == (None, [4, 5])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "x"),
        ("temperature", True),
        ("n", 1.0),
        ("n", None),
        ("top_k", 1.5),
        ("max_tokens", 1.5),
        ("logprobs", True),
        ("prompt_logprobs", "3"),
        ("seed", "a"),
        ("stop", 5),
        ("stop", [5]),
        ("bad_words", [b"x"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [1.0]),
        ("allowed_token_ids", "12"),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: "x"}),
        ("logit_bias", [1]),
    ],
)
def test_parameters_of_a_wrong_type_are_refused_before_they_reach_a_step(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_lists_and_lone_strings_are_taken() -> None:
    params = SamplingParams(stop="abc", bad_words="xyz", stop_token_ids=[1], allowed_token_ids=[2])  # type: ignore[arg-type]
    assert (params.stop, params.bad_words) == (("abc",), ("xyz",))
    assert (params.stop_token_ids, params.allowed_token_ids) == ((1,), (2,))
