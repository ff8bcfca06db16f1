"""Outputs of single choices become RequestOutputs: text, merged choices, one end each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from byte_tokenizer import VOCAB_SIZE, byte_tokenizer

from core.engine.input_processor import InputProcessor, ProcessedRequest
from core.engine.output_processor import OutputKind, OutputProcessor
from core.outputs import EngineOutput, FinishReason, PositionLogprobs, RequestOutput
from core.sampling_params import SamplingParams
from core.text.tokenizer import Tokenizer

PIECES = {1: b"DEF", 2: b"GHI", 3: b"x DEF", 4: b" is", 5: b" Paris", 6: b".", 7: b"</s>"}
INPUTS = InputProcessor(None, vocab_size=VOCAB_SIZE, max_model_len=100, max_logprobs=20)


class Bench:
    """An OutputProcessor with one request in it, fed by hand."""

    def __init__(self, params: SamplingParams, kind: OutputKind, tokenizer: Tokenizer | None = None) -> None:
        self.request: ProcessedRequest = INPUTS.process([50], params, request_id="label")
        self.outputs = OutputProcessor(tokenizer or byte_tokenizer(PIECES))
        self.outputs.add(self.request, kind)

    def step(self, *news: tuple[int, Sequence[int]] | EngineOutput) -> tuple[list[RequestOutput], list[str]]:
        told, to_abort = self.outputs.process([self._output(item) for item in news])
        assert all(key == self.request.key for key, _ in told)
        return [output for _, output in told], to_abort

    def output(self, index: int, token_ids: Sequence[int], **fields: Any) -> EngineOutput:
        return EngineOutput(request_id=self.request.choices[index].request_id, new_token_ids=tuple(token_ids), **fields)

    def _output(self, item: tuple[int, Sequence[int]] | EngineOutput) -> EngineOutput:
        return item if isinstance(item, EngineOutput) else self.output(*item)


@pytest.mark.parametrize(
    ("token_ids", "stop", "include", "text", "steps"),
    [
        ([1, 2], "DE", False, "", 1),
        ([3, 2], "DE", False, "x ", 1),
        ([4, 5, 6], "Pari", False, " is ", 2),
        ([3], "DE", True, "x DE", 1),
    ],
)
def test_a_stop_string_ends_the_choice_inside_a_token(
    token_ids: list[int], stop: str, include: bool, text: str, steps: int
) -> None:
    """H004."""
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=include, max_tokens=20)
    bench = Bench(params, OutputKind.CUMULATIVE)
    num_steps = 0
    while len(bench.outputs):
        (told,), to_abort = bench.step((0, [token_ids[num_steps]]))
        num_steps += 1
    choice = told.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, FinishReason.STOP, stop)
    assert (num_steps, choice.token_ids) == (steps, token_ids[:steps])
    assert to_abort == [bench.request.choices[0].request_id]
    assert len(bench.outputs) == 0


def test_tokens_after_a_stop_string_in_one_step_are_not_counted() -> None:
    bench = Bench(SamplingParams(stop=("Pari",), logprobs=0), OutputKind.DELTA)
    logprobs = tuple(PositionLogprobs((i,), (-1.0,), 1) for i in (4, 5, 6))
    (told,), _ = bench.step(bench.output(0, (4, 5, 6), new_logprobs=logprobs))
    assert told.outputs[0].token_ids == [4, 5]
    assert told.outputs[0].logprobs == list(logprobs[:2])
    assert told.outputs[0].cumulative_logprob == -2.0


def test_news_of_a_choice_that_has_ended_is_passed_over() -> None:
    """A stop is seen one step late by the engine; what comes after it was never said."""
    bench = Bench(SamplingParams(n=2, stop=("DE",)), OutputKind.DELTA)
    bench.step((0, [1]))
    told, to_abort = bench.step((0, [2]), bench.output(0, (), finish_reason=FinishReason.LENGTH))
    assert (told, to_abort) == ([], [])


def test_the_text_of_a_stop_token_is_left_out_and_the_token_counted() -> None:
    bench = Bench(SamplingParams(), OutputKind.FINAL_ONLY)
    (told,), _ = bench.step((0, [5]), bench.output(0, (7,), finish_reason=FinishReason.STOP, stop_reason=7))
    assert (told.outputs[0].text, told.outputs[0].token_ids, told.outputs[0].stop_reason) == (" Paris", [5, 7], 7)


def test_only_the_last_of_several_tokens_is_the_stop_token() -> None:
    bench = Bench(SamplingParams(), OutputKind.FINAL_ONLY)
    (told,), _ = bench.step(bench.output(0, (4, 5, 7), finish_reason=FinishReason.STOP))
    assert (told.outputs[0].text, told.outputs[0].token_ids) == (" is Paris", [4, 5, 7])


def test_text_that_was_held_back_comes_with_the_end() -> None:
    bench = Bench(SamplingParams(stop=("Parish",)), OutputKind.DELTA)
    (first,), _ = bench.step((0, [5]))
    assert (first.outputs[0].text, first.outputs[0].token_ids) == (" ", [5])
    (last,), _ = bench.step(bench.output(0, (), finish_reason=FinishReason.LENGTH))
    assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("Paris", FinishReason.LENGTH)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_each_choice_ends_once_and_the_request_with_the_last(order: tuple[int, int, int]) -> None:
    """H008: one finish for each choice."""
    bench = Bench(SamplingParams(n=3), OutputKind.DELTA)
    finishes: dict[int, int] = {}
    for position, index in enumerate(order):
        (told,), _ = bench.step(bench.output(index, (5,), finish_reason=FinishReason.LENGTH))
        assert told.finished is (position == 2)
        for choice in told.outputs:
            finishes[choice.index] = finishes.get(choice.index, 0) + (choice.finish_reason is not None)
    assert finishes == {0: 1, 1: 1, 2: 1}
    assert bench.step((0, [5]))[0] == []


def test_choices_of_one_step_come_in_one_output() -> None:
    bench = Bench(SamplingParams(n=3), OutputKind.DELTA)
    (told,), _ = bench.step((0, [5]), (2, [6]))
    assert [(choice.index, choice.text) for choice in told.outputs] == [(0, " Paris"), (2, ".")]


def test_kinds_of_output_hold_what_they_say() -> None:
    final = bench = Bench(SamplingParams(), OutputKind.FINAL_ONLY)
    assert final.step((0, [4]))[0] == []
    texts: dict[OutputKind, list[str]] = {}
    for kind in OutputKind:
        bench = Bench(SamplingParams(), kind)
        steps = [bench.step((0, [4])), bench.step(bench.output(0, (5,), finish_reason=FinishReason.LENGTH))]
        texts[kind] = [told.outputs[0].text for outputs, _ in steps for told in outputs]
    assert texts == {
        OutputKind.DELTA: [" is", " Paris"],
        OutputKind.CUMULATIVE: [" is", " is Paris"],
        OutputKind.FINAL_ONLY: [" is Paris"],
    }


def test_prompt_logprobs_times_and_cached_tokens_are_those_of_the_request() -> None:
    bench = Bench(SamplingParams(n=2, prompt_logprobs=0), OutputKind.FINAL_ONLY)
    first = bench.output(
        0, (5,), prompt_logprobs=(None,), num_cached_tokens=16, scheduled_time=12.5, finish_reason=FinishReason.LENGTH
    )
    second = bench.output(1, (5,), num_cached_tokens=48, scheduled_time=13.5, finish_reason=FinishReason.LENGTH)
    (told,), _ = bench.step(first, second)
    assert (told.prompt_logprobs, told.num_cached_tokens) == ([None], 16)
    assert told.metrics is not None
    assert told.metrics.scheduled_time == 12.5
    assert told.metrics.first_token_time is not None
    assert told.metrics.arrival_time <= told.metrics.first_token_time <= (told.metrics.finished_time or 0)


def test_an_abort_ends_every_choice_and_names_those_that_run() -> None:
    bench = Bench(SamplingParams(n=3), OutputKind.DELTA)
    bench.step(bench.output(1, (5,), finish_reason=FinishReason.LENGTH))
    (key,) = bench.outputs.keys_of("label")
    last, running = bench.outputs.abort(key)
    ids = [choice.request_id for choice in bench.request.choices]
    assert running == [ids[0], ids[2]]
    assert {choice.index: choice.finish_reason for choice in last.outputs} == {
        0: FinishReason.ABORT,
        2: FinishReason.ABORT,
    }
    assert last.finished
    assert (len(bench.outputs), bench.outputs.keys_of("label"), bench.outputs.discard(key)) == (0, [], [])


class BrokenTokenizer:
    """Raises on the id 13."""

    special_ids: frozenset[int] = frozenset()
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == 13:
            raise RuntimeError("unlucky")
        return b"a"


def test_one_request_that_cannot_become_text_takes_no_other_with_it() -> None:
    """H003: one odd request must not end the output loop."""
    bench = Bench(SamplingParams(n=2), OutputKind.CUMULATIVE, BrokenTokenizer())  # type: ignore[arg-type]
    (told,), to_abort = bench.step((0, [13]), (1, [5]))
    assert (told.outputs[0].finish_reason, told.outputs[1].text) == (FinishReason.ERROR, "a")
    assert "unlucky" in (told.outputs[0].error or "")
    assert to_abort == [bench.request.choices[0].request_id]


def test_an_error_of_the_engine_is_told_with_its_reason() -> None:
    bench = Bench(SamplingParams(), OutputKind.DELTA)
    (told,), to_abort = bench.step(bench.output(0, (), finish_reason=FinishReason.ERROR, error="masked"))
    assert (told.outputs[0].finish_reason, told.outputs[0].error, told.finished) == (FinishReason.ERROR, "masked", True)
    assert to_abort == []
