"""Random schedules: whatever the scheduler does, each request must give what it would give alone."""

from __future__ import annotations

import os
import random

import pytest
from fake_runner import VOCAB_SIZE, mixed_drafter, perfect_drafter, wrong_drafter
from simulation import Simulation, full_layer, make_kv, sliding_layer

from core.errors import CoreError

NUM_SEEDS = int(os.environ.get("CORE_NUM_SCHEDULES", "240"))
"""Random schedules a test run; set the variable for a longer hunt."""

LAYERS = {
    "full": (full_layer(),) * 2,
    "sliding": (sliding_layer(6),),
    "hybrid": (full_layer(), sliding_layer(5), sliding_layer(5)),
    "two windows": (sliding_layer(3), sliding_layer(9), full_layer()),
    "window of one": (full_layer(), sliding_layer(1)),
}


def random_simulation(rng: random.Random) -> Simulation:
    """A scheduler with random policy, pool and budget."""
    kv = make_kv(
        LAYERS[rng.choice(list(LAYERS))],
        num_blocks=rng.randint(12, 60),
        block_size=rng.choice([1, 2, 4, 8]),
        prefix_caching=rng.random() < 0.8,
        num_host_blocks=rng.choice([None, 0, 10, 100]),
    )
    chunked = rng.random() < 0.8
    return Simulation(
        kv,
        depth=rng.choice([0, 1, 2]),
        drafter=rng.choice([None, None, perfect_drafter, wrong_drafter, mixed_drafter]),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(1, 40) if chunked else 80,
        max_model_len=80,
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=rng.choice([0, 0, 1, 5]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        preemption_mode=rng.choice(["recompute", "swap"]),
        force_preemption=rng.random() < 0.3,
        num_spec_tokens=rng.choice([0, 3]),
    )


def random_params(rng: random.Random) -> dict[str, object]:
    """Sampling parameters that end requests in every way."""
    max_tokens = rng.choice([0, 1, 2, 8, 20, None])
    return {
        "max_tokens": max_tokens,
        "min_tokens": rng.randint(0, 3) if max_tokens is None or max_tokens >= 3 else 0,
        "eos_token_ids": rng.choice([(), (2, 7), tuple(range(0, VOCAB_SIZE, 5))]),
        "stop_token_ids": rng.choice([(), (3,), (4, 9, 14)]),
        "ignore_eos": rng.random() < 0.2,
        "prompt_logprobs": rng.choice([None, None, None, 0]),
        "logprobs": rng.choice([None, 1]),
    }


def add_random(simulation: Simulation, rng: random.Random, request_id: str, prefix: list[int]) -> None:
    """Adds a request that may share a prefix with others, unless it can never be served."""
    prompt = prefix[: rng.randint(0, len(prefix))] + [rng.randrange(3) for _ in range(rng.choice([0, 1, 3, 20]))]
    try:
        simulation.add(
            request_id,
            prompt,
            salt=rng.choice([None, None, "s"]),
            adapter=rng.choice([None, None, None, "a"]),
            priority=rng.randint(-1, 1),
            **random_params(rng),
        )
    except CoreError:
        assert request_id not in simulation.records


@pytest.mark.parametrize("part", range(8))
def test_any_schedule_gives_the_reference_output(part: int) -> None:
    """H038: preemption, swapping, chunks, prefix hits, drafts and aborts change no output and leak nothing."""
    for seed in range(part, NUM_SEEDS, 8):
        run_random(seed)


def run_random(seed: int) -> Simulation:
    """One random schedule from its seed alone."""
    rng = random.Random(seed)
    simulation = random_simulation(rng)
    prefix = [rng.randrange(3) for _ in range(40)]
    num_requests = rng.randint(1, 12)
    for index in range(num_requests):
        add_random(simulation, rng, f"r{index}", prefix)
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            act_randomly(simulation, rng)
    simulation.run()
    simulation.check_reference()
    check_prompt_logprobs(simulation)
    return simulation


def act_randomly(simulation: Simulation, rng: random.Random) -> None:
    """A step, or rarely something that interrupts."""
    action = rng.random()
    if action < 0.06 and simulation.records:
        request_id = rng.choice(list(simulation.records))
        lives = simulation.records[request_id].reason is None
        assert simulation.abort(request_id, "nobody") == ([request_id] if lives else [])
    elif action < 0.08:
        assert simulation.scheduler.reset_prefix_cache()
    elif action < 0.10 and simulation.records:
        simulation.take(simulation.scheduler.fail([rng.choice(list(simulation.records))], "told to"))
    else:
        simulation.step()


def check_prompt_logprobs(simulation: Simulation) -> None:
    """H040, the scheduler's part: sent once, with the first output, and never shortened."""
    for record in simulation.records.values():
        sent = [output.prompt_logprobs for output in record.outputs if output.prompt_logprobs is not None]
        if record.source.sampling_params.prompt_logprobs is None or not record.outputs or record.outputs[0].error:
            assert not sent
            continue
        assert len(sent) == 1 and record.outputs[0].prompt_logprobs is sent[0]
        prompt = record.source.prompt_token_ids
        assert len(sent[0]) == len(prompt) and sent[0][0] is None
        assert [entry.token_ids[0] for entry in sent[0][1:] if entry is not None] == prompt[1:]
