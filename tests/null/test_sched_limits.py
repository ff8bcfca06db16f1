"""What is refused at once, and how long outputs become."""

from __future__ import annotations

import pytest
from simulation import Simulation, full_layer, make_kv, sliding_layer

from core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from core.outputs import FinishReason


def test_prompts_over_the_window_are_refused_with_the_numbers_and_later_ones_run() -> None:
    """H012: too long, fits, too long with its output, up to the window, no room for a single token."""
    simulation = Simulation(make_kv(num_blocks=65, block_size=4), max_model_len=64)
    with pytest.raises(ContextLengthError, match=r"65 tokens and 1 output.*66 in all.*holds 64"):
        simulation.add("a", range(65), max_tokens=1)
    simulation.add("b", range(8), max_tokens=4)
    with pytest.raises(ContextLengthError, match=r"60 tokens and 10 output.*70 in all.*holds 64") as caught:
        simulation.add("c", range(60), max_tokens=10)
    assert caught.value.code == "context_length_exceeded"
    filled = simulation.add("d", range(60), max_tokens=None, ignore_eos=True)
    with pytest.raises(ContextLengthError, match="64 tokens and 1 output"):
        simulation.add("e", range(64), max_tokens=1)
    with pytest.raises(ContextLengthError, match="64 tokens and 1 output"):
        simulation.add("e", range(64), max_tokens=None)
    simulation.run()
    assert (len(filled.tokens), filled.reason) == (4, FinishReason.LENGTH)
    assert len(simulation.records["b"].tokens) == 4


def test_min_tokens_that_cannot_be_reached_are_refused() -> None:
    simulation = Simulation(make_kv(), max_model_len=20)
    with pytest.raises(ContextLengthError, match="12 output tokens"):
        simulation.add("a", range(10), max_tokens=None, min_tokens=12)


def test_an_empty_prompt_and_a_used_id_are_refused() -> None:
    simulation = Simulation(make_kv())
    with pytest.raises(InvalidRequestError, match="no tokens"):
        simulation.add("a", [])
    simulation.add("a", [1])
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        simulation.add("a", [1])
    simulation.run()
    simulation.add("a", [1, 2])
    simulation.run()


def test_a_request_larger_than_the_pool_is_refused_and_holds_up_nobody() -> None:
    """H037: the error says what is needed and available; the next request runs as if the first had not come."""
    simulation = Simulation(make_kv(block_size=16, num_blocks=77), max_model_len=4096, max_num_batched_tokens=2048)
    with pytest.raises(ContextLengthError, match=r"needs 2000 tokens.*holds 1216"):
        simulation.add("first", range(2000), max_tokens=16)
    second = simulation.add("second", range(20), max_tokens=5)
    simulation.run()
    assert len(second.tokens) == 5 and len(simulation.steps) <= 6


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_output_ends_with_length_where_the_pool_ends(mode: str, depth: int) -> None:
    """H037, variant: the prompt fits and the output does not; nothing preempts itself forever."""
    kv = make_kv(block_size=4, num_blocks=11, num_host_blocks=20)
    simulation = Simulation(kv, depth=depth, preemption_mode=mode)
    records = [simulation.add(f"r{i}", range(30 + i), max_tokens=100, ignore_eos=True) for i in range(3)]
    simulation.run(max_steps=300)
    assert [len(record.tokens) for record in records] == [11, 10, 9], "the last token needs no slot"
    assert all(record.reason is FinishReason.LENGTH for record in records)
    simulation.check_reference()


def test_a_window_bounds_memory_so_that_output_does_not_end_early() -> None:
    simulation = Simulation(make_kv([sliding_layer(8)], block_size=4, num_blocks=5))
    record = simulation.add("a", range(60), max_tokens=200, ignore_eos=True)
    simulation.run()
    assert len(record.tokens) == 200
    simulation.check_reference()


def test_without_chunks_a_prompt_must_fit_in_every_group_at_once() -> None:
    kv = make_kv([full_layer(), sliding_layer(4)], block_size=4, num_blocks=11)
    simulation = Simulation(kv, enable_chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64)
    with pytest.raises(ContextLengthError, match=r"needs 21 tokens.*holds 20"):
        simulation.add("a", range(21), max_tokens=1)
    record = simulation.add("b", range(20), max_tokens=9)
    simulation.run()
    assert len(record.tokens) == 1 and record.reason is FinishReason.LENGTH


def test_a_full_queue_refuses_and_says_how_full_it_is() -> None:
    simulation = Simulation(make_kv(), max_num_queued_reqs=2, max_num_seqs=1)
    simulation.add("a", [1], max_tokens=3)
    simulation.add("b", [1], max_tokens=3)
    with pytest.raises(QueueFullError, match="2 requests wait and at most 2 may"):
        simulation.add("c", [1])
    simulation.step()
    simulation.add("d", [1], max_tokens=3)
    simulation.run()
    assert all(len(record.tokens) == 3 for record in simulation.records.values())
