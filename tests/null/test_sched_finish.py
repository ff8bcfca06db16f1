"""When requests end, and with which reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from simulation import Simulation, make_kv

from core.config import SchedulerConfig
from core.outputs import EngineOutput, FinishReason
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.sched import ModelRunnerOutput, Scheduler


def play(token_ids: Sequence[int], prompt_len: int = 3, **params: Any) -> list[EngineOutput]:
    """Outputs of a request whose sampler gives these tokens in turn, until it ends."""
    config = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=2048)
    scheduler = Scheduler(config, make_kv(num_blocks=1000))
    sampling_params = SamplingParams(temperature=0.0, **params)
    scheduler.add_request(
        EngineRequest(request_id="r", prompt_token_ids=[1] * prompt_len, sampling_params=sampling_params)
    )
    outputs: list[EngineOutput] = []
    for step_id, token_id in enumerate(token_ids):
        output = scheduler.schedule()
        result = ModelRunnerOutput(step_id=step_id, sampled_token_ids={"r": [token_id]})
        outputs += scheduler.update(output, result)
        if outputs[-1].finish_reason is not None:
            break
    scheduler.check_integrity()
    return outputs


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def test_ignore_eos_covers_the_eos_ids_of_the_model() -> None:
    """H006 a: every id comes through, and the end is the length."""
    outputs = play([11, 12, 7, 13, 2, 14, 15, 16], eos_token_ids=(2, 7), ignore_eos=True, max_tokens=8)
    assert tokens_of(outputs) == [11, 12, 7, 13, 2, 14, 15, 16]
    assert outputs[-1].finish_reason is FinishReason.LENGTH and outputs[-1].stop_reason is None


def test_ignore_eos_leaves_stop_ids_of_the_caller_alone() -> None:
    """H006 b: an id that the caller asked for still stops, and is named as the reason."""
    outputs = play([11, 12, 7, 13, 2], eos_token_ids=(2, 7), ignore_eos=True, max_tokens=8, stop_token_ids=(13,))
    assert tokens_of(outputs) == [11, 12, 7, 13]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason == 13


def test_any_eos_id_stops_without_a_stop_reason() -> None:
    outputs = play([11, 7, 12], eos_token_ids=(2, 7), max_tokens=8)
    assert tokens_of(outputs) == [11, 7]
    assert outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_reason is None


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    assert play([11, 7], eos_token_ids=(7,), max_tokens=2)[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("field", ["eos_token_ids", "stop_token_ids"])
def test_min_tokens_counts_output_tokens_before_the_one_that_stops(field: str) -> None:
    """H005 a, the scheduler's part: four tokens must come before the end, and the prompt is not counted."""
    outputs = play([7] * 32, prompt_len=3, min_tokens=4, max_tokens=32, **{field: (2, 7)})
    assert len(tokens_of(outputs)) == 5 and outputs[-1].finish_reason is FinishReason.STOP


def test_long_outputs_have_exactly_the_length_asked_for() -> None:
    """H005 b: as many output tokens as min_tokens and max_tokens say, after a prompt of the same length."""
    outputs = play([7] * 2000, prompt_len=1024, min_tokens=1024, max_tokens=1024, ignore_eos=True, eos_token_ids=(7,))
    assert len(tokens_of(outputs)) == 1024 and outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prompt_len", [1, 4, 33])
def test_scoring_computes_the_prompt_and_samples_nothing(prompt_len: int, depth: int) -> None:
    simulation = Simulation(make_kv(), depth=depth, max_num_batched_tokens=8)
    record = simulation.add("a", range(prompt_len), max_tokens=0, prompt_logprobs=2)
    simulation.run()
    assert not any(share.samples for output in simulation.steps for share in output.scheduled)
    assert len(record.outputs) == 1 and record.tokens == [] and record.reason is FinishReason.LENGTH
    entries = record.outputs[0].prompt_logprobs
    assert entries is not None and len(entries) == prompt_len and entries[0] is None and all(entries[1:])


def test_the_first_output_alone_carries_what_is_said_once() -> None:
    simulation = Simulation(make_kv())
    record = simulation.add("a", range(5), max_tokens=3, logprobs=1, ignore_eos=True)
    simulation.run()
    assert [output.scheduled_time is not None for output in record.outputs] == [True, False, False]
    assert [len(output.new_logprobs) for output in record.outputs] == [1, 1, 1]


def test_logprobs_end_with_the_token_that_ends_the_request() -> None:
    """Verified drafts past the end are dropped, and so are their logprobs."""
    from fake_runner import perfect_drafter

    simulation = Simulation(make_kv(), drafter=perfect_drafter)
    record = simulation.add("a", range(5), max_tokens=40, logprobs=1, stop_token_ids=tuple(range(0, 50, 9)))
    simulation.run()
    assert record.reason is FinishReason.STOP
    assert sum(len(output.new_logprobs) for output in record.outputs) == len(record.tokens)
    simulation.check_reference()
