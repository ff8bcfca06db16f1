"""The server over a real AsyncEngine, whose process runs a scripted runner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from byte_tokenizer import FIRST_BYTE
from online import running, until, until_healthy, until_idle
from stub_runner import Script

from core.engine.async_engine import AsyncEngine
from core.serve.chat_template import chat_renderer
from core.serve.server import bind, serve
from core.serve.settings import ServeSettings

pytestmark = pytest.mark.timeout(60)

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@contextlib.asynccontextmanager
async def served(script: Script, **args: Any) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    """A client of a server on a real socket, and its engine."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    ready, stop = asyncio.Event(), asyncio.Event()
    settings = ServeSettings(host="127.0.0.1", port=port, served_model_names=("m",), chat_template=TEMPLATE)
    async with running(script, **args) as engine:

        async def load() -> AsyncEngine:
            return engine

        task = asyncio.create_task(
            serve(
                settings,
                "m",
                load,
                make_renderer=lambda e: chat_renderer(e, settings),
                on_ready=lambda *_: ready.set(),
                stop=stop,
            )
        )
        await asyncio.wait_for(ready.wait(), 10)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield client, engine
        stop.set()
        await asyncio.wait_for(task, 20)


def ids(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def says(text: str, prompt: list[int]) -> Script:
    return Script(outputs={",".join(map(str, prompt)): [*ids(text), 2]})


async def test_a_conversation_through_template_engine_and_text() -> None:
    prompt = ids("<user>hi<bot>")
    messages = [{"role": "user", "content": "hi"}]
    async with served(says("Hé!", prompt), eos=(2,)) as (client, _):
        reply = await client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0})
        body = reply.json()
        assert body["choices"][0]["message"]["content"] == "Hé!"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == len(prompt)
        assert body["usage"]["completion_tokens"] == 5
        again = {"messages": messages, "temperature": 0, "stream": True}
        stream = (await client.post("/v1/chat/completions", json=again)).text
        lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"]["content"] for line in lines]
        assert "".join(deltas) == "Hé!"
        assert not any("\ufffd" in delta for delta in deltas)
        tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
        assert tokens == prompt


async def test_limits_and_ids_are_the_engines() -> None:
    """H012, H013 through the real checks."""
    async with served(Script(max_model_len=64)) as (client, _):
        for body, param in (
            ({"prompt": [5] * 65}, "prompt"),
            ({"prompt": [1000]}, "prompt"),
            ({"prompt": [5], "max_tokens": 64}, "max_tokens"),
            ({"prompt": [5], "stop_token_ids": [1000]}, "stop_token_ids"),
        ):
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param
        room = await client.post("/v1/completions", json={"prompt": [5] * 60, "max_tokens": None, "ignore_eos": True})
        assert room.json()["usage"]["completion_tokens"] == 4


async def test_scoring_and_choices() -> None:
    """H008, H010 b and H011 through the engine."""
    async with served(Script()) as (client, engine):
        body = {"prompt": ids("12345678"), "max_tokens": 0, "echo": True, "logprobs": 1}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["text"] == "12345678"
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["token_logprobs"]) == 8
        assert choice["logprobs"]["text_offset"] == list(range(8))
        body = {"prompt": [5, 6, 7], "n": 3, "max_tokens": 4, "ignore_eos": True, "temperature": 1.0}
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens"] == 3
        assert usage["completion_tokens"] == 12
        metrics = (await client.get("/metrics")).text
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 2.0' in metrics
        await until_idle(engine)


@pytest.mark.parametrize("extra", [{"stream": True, "n": 2}, {}])
async def test_a_client_that_goes_away_frees_its_blocks(extra: dict[str, Any]) -> None:
    """H035 down to the block pool."""
    async with served(Script(step_s=0.005, num_blocks=400)) as (client, engine):
        body = {"prompt": [5] * 40, "max_tokens": 2000, "ignore_eos": True, **extra}
        task = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: engine.stats().num_requests_running > 0, "running")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until_idle(engine)


async def test_a_full_queue_is_429() -> None:
    async with served(Script(step_s=0.02), max_num_seqs=1, max_num_queued_reqs=1) as (client, engine):
        body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}
        async with asyncio.TaskGroup() as group:
            held = []
            for count in (1, 2):
                held.append(group.create_task(client.post("/v1/completions", json=body)))
                await until(
                    lambda count=count: (
                        engine.stats().num_requests_running + engine.stats().num_requests_waiting == count
                    ),
                    f"{count} in the engine",
                )
            refused = await client.post("/v1/completions", json={**body, "stream": True})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        assert [task.result().status_code for task in held] == [200, 200]


async def test_the_engines_death_ends_streams_with_an_error_and_service_returns() -> None:
    async with served(Script(step_s=0.02, kill_on=9)) as (client, engine):
        body = {"prompt": [5], "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            await anext(lines)
            killed = await client.post("/v1/completions", json={"prompt": [9], "max_tokens": 5})
            assert killed.status_code == 503
            rest = [line async for line in lines]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert "data: [DONE]" not in rest
        await until_healthy(engine)
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})).status_code == 200


async def test_cached_tokens_are_reported() -> None:
    """H051 d: the second time the prompt is in the cache."""
    async with served(Script()) as (client, _):
        body = {"prompt": [5] * 50, "max_tokens": 2, "ignore_eos": True}
        counts = [(await client.post("/v1/completions", json=body)).json()["usage"] for _ in range(2)]
    assert counts[0]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < counts[1]["prompt_tokens_details"]["cached_tokens"] <= 50
    assert counts[0]["prompt_tokens"] == counts[1]["prompt_tokens"] == 50
