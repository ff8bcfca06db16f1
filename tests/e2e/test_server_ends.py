"""How a server and its engine end: killed under load, drained at SIGTERM, refused at the start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from core_process import CoreServer, default_device, run_core, served

LONG = {"model": "m", "prompt": [5] * 20, "max_tokens": 450, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def server(tiny_llama: Path) -> Iterator[CoreServer]:
    with served(tiny_llama, "--dtype", "float32", "--threads", "1", "--shutdown-timeout", "60") as server:
        yield server


@dataclass
class End:
    """How a stream ended for its client."""

    status: int
    last: str
    seconds_after_kill: float = 0.0
    tokens: int = 0

    @property
    def code(self) -> str:
        """The error's code; empty where the stream ended well."""
        data = json.loads(self.last.removeprefix("data: ")) if "error" in self.last else {}
        return str(data.get("error", {}).get("code", ""))


async def read(client: httpx.AsyncClient, started: asyncio.Event, clock: list[float]) -> End:
    async with client.stream("POST", "/v1/completions", json=LONG) as reply:
        lines = []
        async for line in reply.aiter_lines():
            if line:
                lines.append(line)
                started.set()
        tokens = sum('"choices":[{' in line for line in lines)
        return End(reply.status_code, lines[-1], time.monotonic() - clock[0] if clock else 0.0, tokens)


async def wait_until_restarting(client: httpx.AsyncClient) -> httpx.Response:
    for _ in range(200):
        reply = await client.get("/health")
        if reply.status_code == 503:
            return reply
        await asyncio.sleep(0.01)
    raise AssertionError("/health never said 503 after the engine was killed")


async def test_a_killed_engine_fails_requests_at_once_and_comes_back(server: CoreServer) -> None:
    """kill -9 of the engine under load: a clear error for everybody at once, then healthy again by itself."""
    pid = server.engine_pid()
    clock: list[float] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        started = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.create_task(read(client, event, clock)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        os.kill(pid, signal.SIGKILL)
        clock.append(time.monotonic())
        health = await wait_until_restarting(client)
        refused = await client.post("/v1/completions", json={**LONG, "stream": False})
        ends = await asyncio.gather(*tasks)
    assert health.json()["error"]["code"] == "engine_restarting"
    assert "SIGKILL" in health.json()["error"]["message"] or "died" in health.json()["error"]["message"]
    assert refused.status_code == 503
    assert refused.json()["error"]["code"].startswith("engine_")
    for end in ends:
        assert end.status == 200
        assert end.code == "engine_dead", end
        assert end.seconds_after_kill < 5.0
    server.wait_healthy()
    assert server.engine_pid() != pid
    reply = server.post("/v1/completions", prompt="back again", max_tokens=4, temperature=0, ignore_eos=True)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 4
    metrics, exposition = server.metrics(), server.get("/metrics").text
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
    assert metrics["vllm:kv_cache_usage_perc"] == 0
    reasons = dict(re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} (\S+)', exposition, re.M))
    assert float(reasons["error"]) >= len(ends) and float(reasons["abort"]) == 0
    assert "Traceback" not in server.log()


async def test_sigterm_lets_running_streams_finish(server: CoreServer) -> None:
    """Running streams end as they would have, new requests get 503, the exit code is 0 and nothing is left."""
    engine = server.engine_pid()
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        started = [asyncio.Event() for _ in range(4)]
        tasks = [asyncio.create_task(read(client, event, [])) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        server.process.send_signal(signal.SIGTERM)
        health = await wait_until_restarting(client)
        refused = await client.post("/v1/completions", json=LONG)
        still_running = [task for task in tasks if not task.done()]
        ends = await asyncio.gather(*tasks)
    assert health.json()["error"]["code"] == "shutting_down"
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    assert still_running, "the streams had ended before the signal: nothing was tested"
    for end in ends:
        assert (end.status, end.last) == (200, "data: [DONE]")
        assert end.tokens >= LONG["max_tokens"]
    assert server.terminate() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


def test_a_port_in_use_ends_the_start_at_once(tiny_llama: Path) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_core("serve", str(tiny_llama), "--host", "127.0.0.1", "--port", port, "--device", default_device())
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert port in line
    assert "in use" in line


def test_an_unknown_device_is_named_with_the_remedy(tiny_llama: Path) -> None:
    done = run_core("serve", str(tiny_llama), "--port", "0", "--device", "nosuchchip")
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert "'nosuchchip'" in line
    assert "install" in line


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "not-here")
    for command in (("serve", missing, "--port", "0"), ("generate", missing, "--prompt", "x")):
        done = run_core(*command, "--device", default_device())
        assert done.returncode == 2
        [line] = done.stderr.strip().splitlines()
        assert missing in line


def test_a_corrupt_gguf_file_is_named(tmp_path: Path) -> None:
    for name, content in (("cut.gguf", b"GGUF\x03\x00\x00\x00\xff\xff"), ("text.gguf", b"not a model\n" * 50)):
        file = tmp_path / name
        file.write_bytes(content)
        done = run_core("serve", str(file), "--port", "0", "--device", default_device())
        assert done.returncode == 2
        [line] = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert name in line
