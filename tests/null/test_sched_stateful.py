"""A stateful search: hypothesis chooses every step, report, arrival, abort and reset, and shrinks what breaks."""

from __future__ import annotations

from typing import Any

from fake_runner import mixed_drafter
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation import Simulation, full_layer, make_kv, sliding_layer

from core.errors import CoreError

prompts = st.tuples(st.integers(0, 20), st.lists(st.integers(0, 1), max_size=6))


class SchedulerMachine(RuleBasedStateMachine):
    """Steps may be up to three in flight, and are reported whenever hypothesis likes."""

    simulation: Simulation

    @initialize(
        hybrid=st.booleans(),
        num_blocks=st.integers(8, 30),
        block_size=st.sampled_from([1, 2, 4]),
        cache=st.booleans(),
        host=st.sampled_from([None, 3, 50]),
        drafts=st.booleans(),
        config=st.fixed_dictionaries({
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(1, 16),
            "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
            "preemption_mode": st.sampled_from(["recompute", "swap"]),
            "force_preemption": st.booleans(),
            "num_spec_tokens": st.sampled_from([0, 3]),
        }),
    )  # fmt: skip
    def build(
        self, hybrid: bool, num_blocks: int, block_size: int, cache: bool, host: int | None, drafts: bool,
        config: dict[str, Any],
    ) -> None:  # fmt: skip
        layers = [full_layer(), sliding_layer(3)] if hybrid else [full_layer()]
        kv = make_kv(layers, num_blocks, block_size, prefix_caching=cache, num_host_blocks=host)
        drafter = mixed_drafter if drafts else None
        self.simulation = Simulation(kv, depth=3, drafter=drafter, max_model_len=40, **config)

    @rule(prompt=prompts, max_tokens=st.integers(0, 8), stop=st.booleans(), priority=st.integers(0, 1))
    def add(self, prompt: tuple[int, list[int]], max_tokens: int, stop: bool, priority: int) -> None:
        shared, own = prompt
        request_id = f"r{len(self.simulation.records)}"
        stop_ids = tuple(range(0, 50, 4)) if stop else ()
        try:
            self.simulation.add(
                request_id, [0, 1] * (shared // 2) + own, max_tokens=max_tokens, stop_token_ids=stop_ids,
                priority=priority,
            )  # fmt: skip
        except CoreError:
            self.simulation.scheduler.check_integrity()

    @rule()
    def step(self) -> None:
        self.simulation.step()

    @rule()
    def report(self) -> None:
        self.simulation.report()

    @rule(index=st.integers(0, 5))
    def abort(self, index: int) -> None:
        self.simulation.abort(f"r{index}")

    @rule()
    def reset(self) -> None:
        self.simulation.scheduler.reset_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.run()
            self.simulation.check_reference()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
