"""Many streams at once over a KV pool that is too small for them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from core_process import CoreServer, served
from tiny import make_tiny

NUM_STREAMS = 64
NUM_PROMPTS = 16
OUTPUT_TOKENS = 80
CLEAR_GAP = 1e-3
"""A prompt is taken where the best token leads by more than this at every position, in nats: no rounding flips it."""


@dataclass
class Outcome:
    """What a client saw of one stream."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    done: bool = False
    left: bool = False


def prompts(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(256) for _ in range(rng.randrange(8, 200))] for _ in range(3 * NUM_PROMPTS)]


def body_of(prompt: list[int]) -> dict[str, object]:
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def alone(client: httpx.AsyncClient, prompt: list[int]) -> Outcome | None:
    """The answer to the prompt when nothing else runs; None where two tokens are nearly level somewhere."""
    reply = await client.post("/v1/completions", json={**body_of(prompt), "logprobs": 2})
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    for top in choice["logprobs"]["top_logprobs"]:
        best, second = sorted(top.values(), reverse=True)[:2]
        if best - second < CLEAR_GAP:
            return None
    return Outcome(choice["token_ids"], choice["text"], choice["finish_reason"], done=True)


async def stream(client: httpx.AsyncClient, prompt: list[int], leave_after: int | None, delay_s: float) -> Outcome:
    """Reads a stream to its end, or leaves after so many events."""
    await asyncio.sleep(delay_s)
    outcome = Outcome()
    async with client.stream("POST", "/v1/completions", json={**body_of(prompt), "stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        events = 0
        async for line in reply.aiter_lines():
            if leave_after is not None and events >= leave_after:
                outcome.left = True
                return outcome
            if line == "data: [DONE]":
                outcome.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    outcome.text += choice["text"]
                    outcome.token_ids += choice.get("token_ids") or []
                    outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
                events += 1
    return outcome


def wait_idle(server: CoreServer) -> dict[str, float]:
    """Returns when no request is left and every block is free again."""
    deadline = time.monotonic() + 30
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any((metrics := server.metrics())[name] for name in names):
        assert time.monotonic() < deadline, {name: metrics[name] for name in names}
        time.sleep(0.1)
    return metrics


@pytest.fixture(params=["one group, recompute", "two groups, swap"])
def small_pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CoreServer]:
    """A server whose pool holds a few of the streams: full attention, and full with sliding attention over swapping."""
    if request.param.startswith("one"):
        yield request.getfixturevalue("tiny_server")
        return
    folder = make_tiny("Gemma3ForCausalLM", tmp_path / "gemma", max_position_embeddings=512, sliding_window=40)
    flags = ("--dtype", "float32", "--threads", "1", "--preemption-mode", "swap", "--swap-space", "64MiB")
    with served(folder, *flags, *request.getfixturevalue("pool_flags")) as server:
        yield server


@pytest.mark.timeout(600)
async def test_64_streams_with_aborts_over_a_small_pool(small_pool: CoreServer) -> None:
    """H035, H038 over real processes: every stream ends right, no block leaks, greedy answers do not change."""
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=small_pool.url, timeout=300, limits=limits) as client:
        expected: list[tuple[list[int], Outcome]] = []
        for prompt in prompts(rng):
            if len(expected) < NUM_PROMPTS and (answer := await alone(client, prompt)) is not None:
                expected.append((prompt, answer))
        assert len(expected) == NUM_PROMPTS
        before = wait_idle(small_pool)["vllm:num_preemptions_total"]

        leaves = [rng.randrange(1, 40) if rng.random() < 0.4 else None for _ in range(NUM_STREAMS)]
        work = [stream(client, expected[i % NUM_PROMPTS][0], leaves[i], rng.random() * 0.5) for i in range(NUM_STREAMS)]
        outcomes = await asyncio.gather(*work)
    for i, outcome in enumerate(outcomes):
        if leaves[i] is not None:
            assert outcome.left
            continue
        assert outcome.done
        assert outcome.finish_reason == "length"
        assert outcome.token_ids == expected[i % NUM_PROMPTS][1].token_ids
        assert outcome.text == expected[i % NUM_PROMPTS][1].text
    assert 10 < sum(leave is not None for leave in leaves) < 54
    after = wait_idle(small_pool)
    assert after["vllm:num_preemptions_total"] > before, "the pool was large enough for all: nothing was tested"
    assert small_pool.get("/health").status_code == 200
    again = small_pool.post("/v1/completions", **{k: v for k, v in body_of(expected[0][0]).items() if k != "model"})
    assert again.json()["choices"][0]["token_ids"] == expected[0][1].token_ids
