"""Preemption: who, how, and that nobody can tell from the output."""

from __future__ import annotations

from typing import Any

import pytest
from simulation import UNIFORM, Simulation, full_layer, make_kv, sliding_layer


def eight_requests(num_blocks: int, layers: Any = UNIFORM, *, cache: bool = True, depth: int = 0, **config: Any):
    kv = make_kv(layers, num_blocks=num_blocks, block_size=4, prefix_caching=cache, num_host_blocks=40)
    simulation = Simulation(kv, depth=depth, **config)
    for index in range(8):
        simulation.add(f"r{index}", [1, 2, 3, 4, 5, 6, index, 8], max_tokens=40, ignore_eos=True)
    simulation.run()
    return simulation


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("layers", [UNIFORM, (full_layer(), sliding_layer(6))])
def test_output_is_the_same_in_an_ample_and_in_a_small_pool(layers: Any, cache: bool, mode: str, depth: int) -> None:
    """H038: identical ids with and without preemption, with and without prefix cache."""
    ample = eight_requests(400, layers, cache=cache, depth=depth)
    small = eight_requests(40, layers, cache=cache, depth=depth, preemption_mode=mode)
    assert ample.scheduler.stats().num_preemptions == 0 < small.scheduler.stats().num_preemptions
    assert any(output.swap_in for output in small.steps) == (mode == "swap")
    for request_id, record in ample.records.items():
        assert len(record.tokens) == 40
        assert small.records[request_id].tokens == record.tokens
    small.check_reference()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_preemption_at_every_step_makes_progress(mode: str, depth: int) -> None:
    """H038: with a request preempted at every step that allows it, each token costs a bounded number of steps."""
    simulation = eight_requests(400, depth=depth, preemption_mode=mode, force_preemption=True)
    simulation.check_reference()
    assert simulation.scheduler.stats().num_preemptions >= len(simulation.steps) // 2
    assert len(simulation.steps) < 8 * 40 * 4


def test_the_most_recent_request_is_preempted_and_keeps_its_place() -> None:
    simulation = Simulation(make_kv(block_size=4, num_blocks=8), max_num_seqs=4)
    for index in range(3):
        simulation.add(f"r{index}", [1, 2, 3, 4, 5, 6], max_tokens=8, ignore_eos=True)
    late = simulation.add("late", [1, 2], max_tokens=1)
    while not simulation.scheduler.stats().num_preemptions:
        output = simulation.step()
    assert output.dropped_request_ids == ["r2"]
    waiting = [request.request_id for request in simulation.scheduler._registry.waiting]
    assert waiting[0] == "r2" and ("late" not in waiting or waiting[1] == "late")
    simulation.run()
    assert late.tokens and simulation.records["r2"].outputs[-1].num_preemptions >= 1
    assert not any(simulation.records[name].outputs[-1].num_preemptions for name in ("r0", "late"))
    simulation.check_reference()


def test_under_priority_the_highest_value_is_preempted_even_if_it_was_scheduled_already() -> None:
    simulation = Simulation(make_kv(block_size=4, num_blocks=8), scheduling_policy="priority")
    for index, priority in enumerate([7, 1, 0]):
        simulation.add(f"r{index}", [1, 2, 3, 4, 5, 6], max_tokens=8, priority=priority, ignore_eos=True)
    while not simulation.scheduler.stats().num_preemptions:
        output = simulation.step()
    assert output.dropped_request_ids == ["r0"]
    assert "r0" not in {share.request_id for share in output.scheduled}
    simulation.run()
    simulation.check_reference()


def test_recomputing_after_preemption_uses_the_prefix_cache() -> None:
    simulation = Simulation(make_kv(block_size=4, num_blocks=100), force_preemption=True)
    simulation.add("a", range(40), max_tokens=3, ignore_eos=True)
    simulation.run()
    starts = [output.scheduled[0].num_computed_tokens for output in simulation.steps if output.new_requests]
    assert starts == [0, 40, 40]


def test_a_preempted_request_comes_back_as_a_new_one_with_all_its_tokens() -> None:
    simulation = Simulation(make_kv(), depth=1, force_preemption=True)
    record = simulation.add("a", [1, 2, 3], max_tokens=5, ignore_eos=True)
    simulation.run()
    sent = [new.token_ids for output in simulation.steps for new in output.new_requests]
    assert sent[0] == [1, 2, 3] and len(sent) == 5
    assert all(tokens == [1, 2, 3, *record.tokens[: len(tokens) - 3]] for tokens in sent)


def test_swapping_without_room_falls_back_to_recomputing() -> None:
    kv = make_kv(block_size=4, num_blocks=40, num_host_blocks=2)
    simulation = Simulation(kv, preemption_mode="swap", force_preemption=True)
    simulation.add("short", [1, 2, 3], max_tokens=4, ignore_eos=True)
    simulation.add("long", range(30), max_tokens=4, ignore_eos=True)
    simulation.run()
    assert any(output.swap_out for output in simulation.steps)
    restarts = [n for output in simulation.steps for n in output.new_requests if n.request_id == "long"]
    assert len(restarts) > 1
    simulation.check_reference()


def test_a_swapped_request_resumes_where_it_stopped() -> None:
    kv = make_kv(block_size=4, num_blocks=40, num_host_blocks=20)
    simulation = Simulation(kv, preemption_mode="swap", force_preemption=True)
    simulation.add("a", range(10), max_tokens=4, ignore_eos=True)
    simulation.run()
    starts = [output.scheduled[0].num_computed_tokens for output in simulation.steps if output.new_requests]
    assert starts == [0, 10, 11, 12]
