"""Who gets the budget of a step."""

from __future__ import annotations

from simulation import Simulation, make_kv, sliding_layer

from core.sched import SchedulerOutput


def shares(output: SchedulerOutput) -> dict[str, int]:
    return {share.request_id: share.num_scheduled_tokens for share in output.scheduled}


def big(**config: object) -> Simulation:
    return Simulation(make_kv(block_size=16, num_blocks=2000, prefix_caching=False), max_model_len=8192, **config)


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    simulation = big(max_num_batched_tokens=100)
    simulation.add("long", range(250), max_tokens=2)
    assert [shares(simulation.step()) for _ in range(4)] == [{"long": 100}, {"long": 100}, {"long": 50}, {"long": 1}]


def test_decodes_come_first_and_are_never_starved_by_prompts() -> None:
    simulation = big(max_num_batched_tokens=32)
    for index in range(4):
        simulation.add(f"d{index}", range(5), max_tokens=40, ignore_eos=True)
    simulation.step()
    simulation.add("long", range(600), max_tokens=1)
    for _ in range(15):
        output = simulation.step()
        assert [share.num_scheduled_tokens for share in output.scheduled] == [1, 1, 1, 1, 28]


def test_short_prompts_pass_a_long_one() -> None:
    simulation = big(max_num_batched_tokens=64)
    simulation.add("long", range(1000), max_tokens=1)
    simulation.step()
    for index in range(3):
        simulation.add(f"s{index}", range(10), max_tokens=1)
    assert shares(simulation.step()) == {"long": 32, "s0": 10, "s1": 10, "s2": 10}


def test_short_prompts_pass_several_long_ones_and_these_go_on_in_order() -> None:
    simulation = big(max_num_batched_tokens=64)
    simulation.add("long0", range(1000), max_tokens=1)
    simulation.add("long1", range(1000), max_tokens=1)
    assert shares(simulation.step()) == {"long0": 32, "long1": 32}
    simulation.add("short", range(20), max_tokens=1)
    assert shares(simulation.step()) == {"long0": 32, "short": 20, "long1": 12}
    while "long0" in simulation.scheduler._registry.requests:
        assert shares(simulation.step())["long0"] > 0


def test_the_threshold_bounds_a_prompt_only_while_others_want_the_budget() -> None:
    simulation = big(max_num_batched_tokens=64, long_prefill_token_threshold=16)
    simulation.add("long", range(1000), max_tokens=1)
    simulation.add("short", range(10), max_tokens=1)
    assert shares(simulation.step()) == {"long": 16, "short": 10}
    assert shares(simulation.step()) == {"long": 64}


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    simulation = big(max_num_batched_tokens=32)
    simulation.add("long", range(400), max_tokens=1)
    for index in range(60):
        simulation.add(f"s{index}", range(30), max_tokens=1)
        simulation.step()
    assert simulation.records["long"].tokens


def test_every_running_request_gets_a_token_in_every_step_even_with_a_tiny_budget() -> None:
    simulation = big(max_num_batched_tokens=3, max_num_seqs=8)
    for index in range(6):
        simulation.add(f"r{index}", [1, 2], max_tokens=20, ignore_eos=True)
    for _ in range(60):
        running = set(simulation.scheduler._registry.running)
        assert running <= set(shares(simulation.step()))
    simulation.run()
    simulation.check_reference()


def test_without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() -> None:
    simulation = big(max_num_batched_tokens=8192, enable_chunked_prefill=False)
    simulation.add("a", range(5000), max_tokens=1)
    simulation.add("b", range(5000), max_tokens=1)
    simulation.add("c", range(10), max_tokens=1)
    assert shares(simulation.step()) == {"a": 5000}, "nobody passes b, or b might wait forever"
    assert shares(simulation.step()) == {"b": 5000, "c": 10}


def test_fcfs_starts_requests_in_order_of_arrival_whatever_their_priority() -> None:
    simulation = big(max_num_seqs=1)
    for index, priority in enumerate([5, -5, 0]):
        simulation.add(f"r{index}", [1], max_tokens=1, priority=priority)
    assert [list(shares(simulation.step())) for _ in range(3)] == [["r0"], ["r1"], ["r2"]]


def test_priority_starts_the_lowest_value_first_and_then_the_earliest() -> None:
    simulation = big(max_num_seqs=1, scheduling_policy="priority")
    for index, priority in enumerate([5, -5, 5, 0]):
        simulation.add(f"r{index}", [1], max_tokens=1, priority=priority)
    assert [list(shares(simulation.step())) for _ in range(4)] == [["r1"], ["r3"], ["r0"], ["r2"]]


def test_a_request_that_lacks_blocks_is_not_passed_by_smaller_ones_forever() -> None:
    simulation = Simulation(make_kv(block_size=4, num_blocks=11, prefix_caching=False), max_num_batched_tokens=64)
    simulation.add("first", range(20), max_tokens=8, ignore_eos=True)
    simulation.step()
    simulation.add("large", range(30), max_tokens=1)
    simulation.add("small", range(4), max_tokens=1)
    assert simulation.scheduler.num_waiting == 2
    assert list(shares(simulation.step())) == ["first"]
    simulation.run()
    assert simulation.scheduler.stats().num_preemptions == 0, "large starts only when all of it fits"


def test_a_long_prompt_takes_half_of_what_decodes_leave() -> None:
    simulation = big(max_num_batched_tokens=16, max_num_seqs=16)
    for index in range(10):
        simulation.add(f"d{index}", [1], max_tokens=40, ignore_eos=True)
    simulation.step()
    simulation.add("long", range(600), max_tokens=1)
    simulation.step()
    simulation.add("short", range(3), max_tokens=1)
    prompts = {name: count for name, count in shares(simulation.step()).items() if not name.startswith("d")}
    assert prompts == {"long": 3, "short": 3}


def test_nothing_that_began_in_a_step_is_preempted_in_it() -> None:
    """Chunks longer than the window hold more than the window; a second long prompt then finds no blocks."""
    kv = make_kv([sliding_layer(6)], block_size=2, num_blocks=23, prefix_caching=False)
    simulation = Simulation(kv, max_num_batched_tokens=32)
    for index, num_tokens in enumerate([60, 59, 60]):
        simulation.add(f"long{index}", range(num_tokens), max_tokens=2)
    for index, num_tokens in enumerate([9, 10, 4, 2, 8, 10, 8, 3]):
        simulation.step()
        simulation.add(f"s{index}", range(num_tokens), max_tokens=2)
    simulation.run()
    simulation.check_reference()
