"""Steps in flight, drafts, aborts and failures."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runner import Drafter, mixed_drafter, perfect_drafter, wrong_drafter
from simulation import Simulation, full_layer, make_kv, sliding_layer

from core.outputs import FinishReason
from core.sched import ModelRunnerOutput


def test_the_next_step_counts_on_a_token_that_is_not_known_yet() -> None:
    simulation = Simulation(make_kv(), depth=1)
    simulation.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True)
    starts = [simulation.step().scheduled[0].num_computed_tokens for _ in range(4)]
    assert starts == [0, 3, 4, 5]
    assert simulation.step().scheduled == [], "four tokens are known or on their way"
    simulation.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_step_produced_after_a_stop_is_ignored_and_given_back(depth: int) -> None:
    simulation = Simulation(make_kv(), depth=depth)
    record = simulation.add("a", [1, 2, 3], max_tokens=400, stop_token_ids=tuple(range(0, 50, 6)))
    simulation.run()
    num_sampled = sum(share.samples for output in simulation.steps for share in output.scheduled)
    assert record.reason is FinishReason.STOP and num_sampled == len(record.tokens) + depth
    simulation.check_reference()


def test_a_block_with_an_unknown_token_is_not_found_by_others() -> None:
    """Step two computes a token that the host does not know; its block must have no name until it does."""
    simulation = Simulation(make_kv(block_size=4), depth=1)
    simulation.add("a", [1, 2, 3], max_tokens=6, ignore_eos=True)
    simulation.step()
    assert not any(block.block_hash for block in simulation.kv.pool.blocks)
    simulation.step()
    assert not any(block.block_hash for block in simulation.kv.pool.blocks), "computed, and not reported"
    simulation.step()
    assert sum(block.block_hash is not None for block in simulation.kv.pool.blocks) == 1
    simulation.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_at_any_moment_gives_everything_back_and_a_second_has_no_effect(depth: int) -> None:
    """H035: waiting, running, in flight; nothing is decoded afterwards and the runner is told once."""
    for moment in range(8):
        simulation = Simulation(make_kv(), depth=depth, max_num_seqs=1, max_num_batched_tokens=4)
        simulation.add("a", range(9), max_tokens=200, ignore_eos=True)
        simulation.add("queued", range(9), max_tokens=200, ignore_eos=True)
        for _ in range(moment):
            simulation.step()
        assert simulation.abort("a", "a", "nobody", "queued") == ["a", "queued"]
        assert simulation.abort("a") == []
        assert simulation.scheduler.num_running == simulation.scheduler.num_waiting == 0
        assert simulation.kv.usage == 0.0
        num_steps = simulation.scheduler.stats().num_steps
        simulation.run()
        assert simulation.scheduler.stats().num_steps == num_steps, "a zombie was decoded"
        dropped = [request_id for output in simulation.steps for request_id in output.dropped_request_ids]
        assert dropped == (["a"] if moment else [])


def test_an_id_can_be_used_again_while_a_step_of_its_last_owner_is_in_flight() -> None:
    simulation = Simulation(make_kv(), depth=2)
    simulation.add("a", [1, 2, 3], max_tokens=50, ignore_eos=True)
    simulation.step(), simulation.step()
    simulation.abort("a")
    record = simulation.add("a", [4, 5], max_tokens=5, ignore_eos=True)
    simulation.run()
    assert len(record.tokens) == 5
    simulation.check_reference()


def test_swapped_requests_can_be_aborted() -> None:
    simulation = Simulation(make_kv(num_host_blocks=20), preemption_mode="swap", force_preemption=True, max_num_seqs=1)
    simulation.add("a", range(9), max_tokens=9, ignore_eos=True)
    simulation.add("b", range(9), max_tokens=9, ignore_eos=True, priority=1)
    while not any(output.swap_out for output in simulation.steps):
        simulation.step()
    simulation.abort("a", "b")
    simulation.run()


@pytest.mark.parametrize("drafter", [perfect_drafter, wrong_drafter, mixed_drafter])
@pytest.mark.parametrize("layers", [(full_layer(),), (full_layer(), sliding_layer(5))])
@pytest.mark.parametrize("settings", [{}, {"force_preemption": True}, {"max_num_batched_tokens": 5}])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    drafter: Drafter, layers: Any, settings: dict[str, Any]
) -> None:
    simulation = Simulation(make_kv(layers, block_size=4), drafter=drafter, **settings)
    for index in range(3):
        simulation.add(f"r{index}", [1, 2, 3, index], max_tokens=30, stop_token_ids=(9,) if index else ())
    simulation.run()
    simulation.check_reference()
    assert any(share.draft_token_ids for output in simulation.steps for share in output.scheduled)


@pytest.mark.parametrize("drafter", [perfect_drafter, wrong_drafter, mixed_drafter])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"force_preemption": True}, {"force_preemption": True, "preemption_mode": "swap"}]
)
def test_drafts_are_verified_with_steps_in_flight(drafter: Drafter, depth: int, settings: dict[str, Any]) -> None:
    """With `num_spec_tokens` a request waits for its last token, so that drafts can follow it; others run meanwhile."""
    kv = make_kv((full_layer(), sliding_layer(5)), block_size=4, num_host_blocks=200)
    simulation = Simulation(kv, depth=depth, drafter=drafter, num_spec_tokens=3, **settings)
    for index in range(3):
        simulation.add(f"r{index}", [1, 2, 3, index], max_tokens=30, stop_token_ids=(9,) if index else ())
        simulation.step()
    simulation.run()
    simulation.check_reference()
    shares = [share for output in simulation.steps for share in output.scheduled]
    if not settings:
        assert sum(bool(share.draft_token_ids) for share in shares) > 10


def test_the_runner_proposes_drafts_with_its_result() -> None:
    simulation = Simulation(make_kv(), num_spec_tokens=2)
    simulation.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
    output = simulation.scheduler.schedule()
    result = simulation.runner.execute(output)
    result.draft_token_ids = {"a": [7, 8], "nobody": [1]}
    simulation.take(simulation.scheduler.update(output, result))
    assert list(simulation.step().scheduled[0].draft_token_ids) == [7, 8]
    simulation.run()
    simulation.check_reference()


def test_accepted_drafts_save_steps_and_do_not_pass_max_tokens() -> None:
    simulation = Simulation(make_kv(), drafter=perfect_drafter)
    record = simulation.add("a", [1, 2, 3], max_tokens=10, ignore_eos=True)
    simulation.run()
    assert len(record.tokens) == 10
    assert [len(output.new_token_ids) for output in record.outputs] == [1, 4, 4, 1]


def test_blocks_of_rejected_drafts_are_not_found_by_others() -> None:
    simulation = Simulation(make_kv(block_size=1), drafter=wrong_drafter)
    record = simulation.add("a", [1, 2, 3], max_tokens=8, ignore_eos=True)
    simulation.run()
    num_named = sum(block.block_hash is not None for block in simulation.kv.pool.blocks)
    assert num_named == 3 + len(record.tokens) - 1


def test_drafts_for_requests_that_do_not_run_are_dropped() -> None:
    simulation = Simulation(make_kv(), depth=1)
    simulation.scheduler.set_draft_token_ids("nobody", [1])
    simulation.add("a", [1, 2, 3], max_tokens=4, ignore_eos=True)
    simulation.step()
    simulation.scheduler.set_draft_token_ids("a", [1])
    assert simulation.step().scheduled[0].draft_token_ids == ()
    simulation.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_the_runner_cannot_sample_ends_alone(depth: int) -> None:
    simulation = Simulation(make_kv(), depth=depth)
    bad = simulation.add("bad", [1, 2], max_tokens=5, ignore_eos=True)
    good = simulation.add("good", [1, 2], max_tokens=5, ignore_eos=True)
    simulation.runner.errors["bad"] = "every candidate is masked"
    simulation.run()
    assert bad.reason is FinishReason.ERROR and bad.outputs[-1].error == "every candidate is masked"
    assert len(good.tokens) == 5
    simulation.check_reference()


@pytest.mark.parametrize("token_ids", [[], [1, 2]])
def test_a_runner_that_gives_too_few_or_too_many_tokens_ends_the_request(token_ids: list[int]) -> None:
    simulation = Simulation(make_kv())
    simulation.add("a", [1, 2], max_tokens=5)
    output = simulation.scheduler.schedule()
    outputs = simulation.scheduler.update(output, ModelRunnerOutput(step_id=0, sampled_token_ids={"a": token_ids}))
    assert outputs[0].finish_reason is FinishReason.ERROR and outputs[0].error is not None
    assert f"gave {len(token_ids)} tokens where 1 to 1" in outputs[0].error
    simulation.scheduler.check_integrity()
    assert simulation.kv.usage == 0.0


def test_a_step_that_raised_takes_its_requests_along_and_the_rest_goes_on() -> None:
    simulation = Simulation(make_kv(), max_num_seqs=1)
    simulation.add("a", [1, 2], max_tokens=5)
    survivor = simulation.add("b", [1, 2], max_tokens=5, ignore_eos=True)
    output = simulation.scheduler.schedule()
    simulation.runner.execute(output)
    simulation.take(simulation.scheduler.fail_step(output, "the device hiccuped"))
    assert simulation.records["a"].outputs[0].error == "the device hiccuped"
    simulation.run()
    assert len(survivor.tokens) == 5


def test_requests_of_a_step_that_is_never_reported_end_with_an_error() -> None:
    simulation = Simulation(make_kv())
    simulation.add("a", [1, 2], max_tokens=5)
    simulation.runner.execute(simulation.scheduler.schedule())
    simulation.step()
    assert simulation.records["a"].reason is FinishReason.ERROR
    simulation.run()


def test_an_idle_scheduler_has_nothing_to_do_and_uses_no_step_ids() -> None:
    simulation = Simulation(make_kv())
    assert not simulation.scheduler.has_work()
    assert simulation.scheduler.schedule().empty and simulation.scheduler.schedule().step_id == 0
    assert simulation.scheduler.update(simulation.scheduler.schedule(), ModelRunnerOutput(step_id=0)) == []
    simulation.add("a", [1], max_tokens=1)
    assert simulation.scheduler.has_work()
    simulation.run()
    assert not simulation.scheduler.has_work()


def test_stats_count_what_happened() -> None:
    simulation = Simulation(make_kv(num_blocks=65, block_size=4))
    simulation.add("a", range(8), max_tokens=3, ignore_eos=True)
    simulation.step()
    stats = simulation.scheduler.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.num_steps) == (1, 0, 1)
    assert (stats.num_blocks, stats.num_free_blocks, stats.iteration_tokens) == (64, 62, 8)
    assert stats.kv_cache_usage == pytest.approx(2 / 64)
    simulation.run()
