"""Chunks by a measured cost model: a device with a simulated clock, whose costs the scheduler has to find out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from fake_runner import FakeRunner
from simulation import Simulation, make_kv

from core.config import SchedulerConfig
from core.errors import ConfigError
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.sched import ModelRunnerOutput, Scheduler, SchedulerOutput
from core.sched.step_costs import StepCosts, StepLoad
from core.sched.step_sizes import StepSizes, filled_size, paid_size


@dataclass
class Costs:
    """Seconds of a device."""

    step: float = 0.010
    decode: float = 0.001
    mixed: float = 0.0
    token: float = 0.001
    pair: float = 0.0
    row: float = 0.0
    """For each row of the next size that a step has, as recorded steps cost."""
    noise: Callable[[], float] = field(default=lambda: 1.0)

    def seconds(self, output: SchedulerOutput) -> float:
        prompts = [share for share in output.scheduled if share.num_scheduled_tokens > 1]
        tokens = sum(share.num_scheduled_tokens for share in prompts)
        pairs = sum(
            share.num_scheduled_tokens * (share.num_computed_tokens + share.num_scheduled_tokens / 2)
            for share in prompts
        )
        work = self.step + self.decode * (len(output.scheduled) - len(prompts))
        work += self.row * paid_size(len(output.scheduled) - len(prompts) + tokens)
        return (work + self.mixed * bool(prompts) + self.token * tokens + self.pair * pairs) * self.noise()


class TimedServer:
    """Scheduler and fake runner on a clock that only steps move; `depth` steps are submitted ahead."""

    def __init__(self, costs: Costs, *, stretch: float | None = 2.0, depth: int = 1, **config: object) -> None:
        settings = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192, **config}
        self.now = 0.0
        kv = make_kv(block_size=16, num_blocks=8000, prefix_caching=False)
        self.scheduler = Scheduler(
            SchedulerConfig(max_step_stretch=stretch, **settings),
            kv,
            timer=lambda: self.now,  # type: ignore[arg-type]
        )
        self.runner = FakeRunner(kv.groups, kv.block_size)
        self.costs, self.depth = costs, depth
        self.pending: deque[tuple[SchedulerOutput, ModelRunnerOutput, float]] = deque()
        self.device_free = 0.0
        self.tokens: dict[str, list[float]] = {}
        self.loads: list[tuple[int, int]] = []

    def add(self, request_id: str, num_prompt: int, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        prompt = [hash((request_id, index)) % 50 for index in range(num_prompt)]
        self.scheduler.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=params)
        )
        self.tokens[request_id] = []

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        if not output.empty:
            self.device_free = max(self.device_free, self.now) + self.costs.seconds(output)
            self.pending.append((output, self.runner.execute(output), self.device_free))
            tokens = sum(s.num_scheduled_tokens for s in output.scheduled if s.num_scheduled_tokens > 1)
            self.loads.append((sum(s.num_scheduled_tokens == 1 for s in output.scheduled), tokens))
        if self.pending and (output.empty or len(self.pending) > self.depth):
            done, result, at = self.pending.popleft()
            self.now = max(self.now, at)
            for news in self.scheduler.update(done, result):
                self.tokens[news.request_id] += [self.now] * len(news.new_token_ids)
        return output

    def run_until(self, seconds: float) -> None:
        while self.now < seconds and (self.scheduler.has_work() or self.pending):
            self.step()
        self.now = max(self.now, seconds)

    def gaps(self, prefix: str, since: float = 0.0) -> list[float]:
        times = [t for request_id, t in self.tokens.items() if request_id.startswith(prefix)]
        return sorted(b - a for each in times for a, b in pairwise(each) if a >= since)


def p99(gaps: list[float]) -> float:
    return gaps[int(0.99 * (len(gaps) - 1))]


def loaded(server: TimedServer, *, streams: int, seconds: int) -> tuple[float, float]:
    """(quiet p99, p99 while a prompt of 2,048 tokens arrives every second) of running streams."""
    for index in range(streams):
        server.add(f"stream{index}", 64, 6000)
    server.run_until(server.now + 5.0)
    begin = server.now
    quiet = p99(server.gaps("stream", since=begin - 4.0))
    for second in range(seconds):
        server.add(f"prompt{second}", 2048, 1)
        server.run_until(begin + second + 1.0)
    return quiet, p99(server.gaps("stream", since=begin))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs(step=0.030, token=0.0006),
        Costs(token=0.0002, pair=2e-7),
        Costs(mixed=0.004),
        Costs(token=0.0004, pair=1e-7, mixed=0.002),
        Costs(token=0.0, row=0.0016),
    ],
)
def test_running_streams_keep_within_twice_their_quiet_gap(costs: Costs, depth: int) -> None:
    quiet, busy = loaded(TimedServer(costs, depth=depth), streams=8, seconds=8)
    assert busy <= 2.0 * quiet


def test_noise_of_a_shared_machine_is_borne() -> None:
    rng = random.Random(1)
    costs = Costs(token=0.0005, noise=lambda: rng.choice([1.0] * 60 + [1.05] * 30 + [1.2] * 9 + [4.0]))
    quiet, busy = loaded(TimedServer(costs), streams=8, seconds=8)
    assert busy <= 2.0 * quiet


def test_without_the_bound_the_same_prompts_make_gaps_many_times_as_long() -> None:
    quiet, busy = loaded(TimedServer(Costs(token=0.0002), stretch=None), streams=8, seconds=8)
    assert busy > 5.0 * quiet


def test_prompts_go_on_as_fast_as_the_bound_allows() -> None:
    server = TimedServer(Costs(token=0.0002))
    loaded(server, streams=8, seconds=8)
    assert sum(bool(server.tokens[f"prompt{second}"]) for second in range(8)) >= 7  # a fifth of the time is enough
    chunks = [tokens for decodes, tokens in server.loads[-150:] if decodes and tokens]
    assert max(chunks) <= 0.018 / 0.0002
    assert sorted(chunks)[len(chunks) // 2] >= 0.6 * 0.8 * 0.018 / 0.0002


@pytest.mark.parametrize(("streams", "row", "rows"), [(4, 0.0018, 8), (4, 0.0006, 16), (5, 0.0018, 16), (2, 0.0018, 8)])
def test_steps_are_filled_up_to_the_size_that_they_pay_for(streams: int, row: float, rows: int) -> None:
    """Of 1.8 ms a row 4 rows take 17 ms, 8 take 24 ms, which twice as long allows, and 16 take 39 ms."""
    server = TimedServer(Costs(decode=0.0, token=0.0, row=row))
    quiet, busy = loaded(server, streams=streams, seconds=8)
    chunks = [tokens for decodes, tokens in server.loads[-200:] if decodes == streams and tokens]
    assert sorted(chunks)[len(chunks) // 2] == rows - streams
    assert busy <= 2.0 * quiet


def test_sizes_are_the_least_that_hold_a_step_and_the_largest_that_it_fills() -> None:
    sizes = [0, 1, 2, 4, *range(8, 73, 8)]
    for num_rows in range(65):
        assert paid_size(num_rows) == min(size for size in sizes if size >= num_rows)
        assert filled_size(num_rows) == max(size for size in sizes if size <= num_rows)


def test_a_size_that_was_too_slow_is_left_until_it_is_forgotten() -> None:
    sizes = StepSizes()
    assert sizes.fitting(4, 16, 1.8) == 16, "nothing is known"
    for _ in range(2):
        sizes.observe(4, 12, 2.4)
    assert sizes.fitting(4, 16, 1.8) == 16, "two steps are no proof"
    sizes.observe(4, 10, 2.4)
    assert sizes.fitting(4, 16, 1.8) == 8, "steps of 14 rows pay for 16"
    assert sizes.fitting(8, 16, 1.8) == 16, "of 8 quiet rows it may be fast enough"
    for _ in range(1001):
        sizes.observe(4, 4, 1.2)
    assert sizes.fitting(4, 16, 1.8) == 16
    for _ in range(3):
        sizes.observe(4, 12, 1.4)
        assert sizes.fitting(4, 16, 1.8) >= 16, "a new step brings no old ones back"


def test_prompts_recover_from_a_neighbour_that_slowed_the_device_for_a_while() -> None:
    server = TimedServer(Costs(token=0.0005, noise=lambda: 2.2 if 3.0 < server.now < 6.0 else 1.0))
    for index in range(4):
        server.add(f"stream{index}", 64, 3000)
    server.run_until(3.0)
    for index in range(12):
        server.add(f"prompt{index}", 2048, 1)  # there is a prompt in every step from here on
    server.run_until(27.0)
    begin = len(server.loads)
    server.run_until(29.0)
    assert min(tokens for _, tokens in server.loads[begin:]) >= 12


def test_a_larger_size_is_tried_where_the_smaller_one_leaves_room_for_it() -> None:
    sizes = StepSizes()
    for _ in range(3):
        sizes.observe(4, 4, 1.1)
    assert sizes.fitting(4, 8, 1.8) == 16, "1.3 is expected of 16, and 24 is not tried before that is known"
    for _ in range(3):
        sizes.observe(4, 12, 1.9)
    assert sizes.fitting(4, 8, 1.8) == 8
    for _ in range(15):
        sizes.observe(4, 12, 1.25)
    assert sizes.fitting(4, 8, 1.8) == 24


def test_one_slow_step_where_a_size_is_recorded_does_not_condemn_it() -> None:
    sizes = StepSizes()
    for ratio in (20.0, 1.2, 1.2):
        sizes.observe(4, 4, ratio)
    assert sizes.fitting(4, 8, 1.3) == 8


def test_a_costlier_device_gets_smaller_chunks() -> None:
    def median_chunk(token: float) -> int:
        server = TimedServer(Costs(token=token))
        loaded(server, streams=8, seconds=4)
        return sorted(tokens for decodes, tokens in server.loads if decodes and tokens)[10]

    assert median_chunk(0.0001) > 2 * median_chunk(0.0004)


def test_a_prompt_alone_takes_the_whole_budget() -> None:
    server = TimedServer(Costs())
    for index in range(3):
        server.add(f"p{index}", 2048, 1)
        server.run_until(server.now + 60.0)
    assert [load for load in server.loads if load[1]] == [(0, 2048)] * 3


def test_nothing_is_bounded_before_a_step_was_measured() -> None:
    server = TimedServer(Costs(), depth=1)
    server.add("first", 32, 50)
    server.step()
    server.add("second", 1000, 5)
    server.step()
    assert server.loads[1] == (1, 1000)


def test_a_burst_of_short_prompts_is_served_at_once_but_not_again_and_again() -> None:
    server = TimedServer(Costs(token=0.001))
    server.add("stream", 64, 6000)
    server.run_until(10.0)
    at = len(server.loads)
    for burst in range(3):
        for index in range(10):
            server.add(f"short{burst}-{index}", 32, 1)
        server.run_until(server.now + 0.2)
    tokens = [tokens for _, tokens in server.loads[at:]]
    assert tokens[0] == 320
    assert max(tokens[1:]) <= 10


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    server = TimedServer(Costs(token=0.001))
    server.add("stream", 64, 6000)
    server.run_until(5.0)
    server.add("long", 4000, 1)
    server.run_until(5.5)
    server.add("short", 60, 1)
    server.run_until(6.5)
    assert server.tokens["short"] and not server.tokens["long"]


def test_every_prompt_ends_even_where_a_step_with_prompts_can_never_be_short() -> None:
    server = TimedServer(Costs(mixed=1.0))
    server.add("stream", 64, 6000)
    server.run_until(5.0)
    server.add("prompt", 200, 1)
    server.run_until(5.0 + 40.0)
    assert server.tokens["prompt"]


def test_offline_nothing_is_timed() -> None:
    scheduler = TimedServer(Costs(), stretch=None).scheduler
    assert scheduler._bound is None
    assert SchedulerConfig(max_step_stretch=0).max_step_stretch == 0


@pytest.mark.parametrize("stretch", [1.0, -1.0, 0.5, float("inf"), float("nan")])
def test_a_stretch_that_no_step_can_keep_is_refused(stretch: float) -> None:
    with pytest.raises(ConfigError, match="--max-step-stretch"):
        SchedulerConfig(max_step_stretch=stretch)


def test_costs_are_found_from_steps_alone() -> None:
    costs, rng = StepCosts(), random.Random(0)
    for _ in range(20):
        costs.observe(StepLoad(8), 0.020)
    for _ in range(200):
        tokens, start = rng.randrange(16, 200), rng.randrange(4000)
        pairs = tokens * (start + tokens / 2)
        costs.observe(StepLoad(8, tokens, pairs), 0.020 + 0.003 + 0.0002 * tokens + 1e-7 * pairs)
    assert costs.quiet_s(7) == 0.020
    for start in (0, 1000, 4000):
        tokens = costs.num_tokens_within(0.020, start)
        assert tokens is not None
        took = 0.003 + 0.0002 * tokens + 1e-7 * tokens * (start + tokens / 2)
        assert took == pytest.approx(0.020, rel=0.1)
    assert costs.num_tokens_within(0.001, 0) == pytest.approx(0.001 / 0.0002, abs=1)


@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_the_same_whatever_the_clock_says(depth: int) -> None:
    rng = random.Random(depth)
    simulation = Simulation(make_kv(num_blocks=65), depth=depth, max_step_stretch=2.0)
    for index in range(40):
        prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 90))]
        simulation.add(f"r{index}", prompt, max_tokens=rng.randrange(1, 30), ignore_eos=True)
        for _ in range(rng.randrange(4)):
            simulation.step()
    simulation.run()
    simulation.check_reference()
