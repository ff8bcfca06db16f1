"""Clients that go away, and a server process from start to end, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, says

from core.errors import ConfigError, ModelNotFoundError
from core.serve.prompts import ChatRenderer
from core.serve.server import bind, serve
from core.serve.settings import ServeSettings


@dataclass
class RunningServer:
    """A server in a thread of its own, with a fake engine."""

    engine: FakeEngine
    settings: dict[str, Any] = field(default_factory=dict)
    load_s: float = 0.0
    url: str = ""
    error: BaseException | None = None

    def __enter__(self) -> RunningServer:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10), "the server did not become ready"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not end"

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()

        async def load() -> FakeEngine:
            await asyncio.sleep(self.load_s)
            return self.engine

        def on_ready(_: Any, url: str, seconds: float) -> None:
            self.url = url
            self._ready.set()

        settings = ServeSettings(host="127.0.0.1", port=0, served_model_names=("m",), **self.settings)
        await serve(
            settings,
            "models/m",
            load,
            make_renderer=lambda engine: ChatRenderer(engine.template),
            on_ready=on_ready,
            stop=self._stop,
        )


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer(FakeEngine(step_s=0.01, max_model_len=100_000)) as running:
        yield running


def until(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def raw_request(url: str, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
        yield sock


def no_template(_: Any) -> ChatRenderer:
    return ChatRenderer(None)


LONG = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}


@pytest.mark.parametrize("extra", [{"stream": True}, {"stream": True, "n": 2}, {}, {"prompt": ["a", "b"]}])
def test_a_client_that_goes_away_is_aborted(server: RunningServer, extra: dict[str, Any]) -> None:
    """H035: streams, several choices, several prompts, and no stream at all."""
    engine = server.engine
    with raw_request(server.url, "/v1/completions", {**LONG, **extra}) as sock:
        if extra.get("stream"):
            assert b"data:" in sock.recv(65536) + sock.recv(65536)
        until(lambda: engine.running > 0 and engine.steps > 3)
    until(lambda: engine.running == 0)
    steps = engine.steps
    assert engine.waiting == 0
    assert engine.aborted == len(engine.seen)
    time.sleep(0.1)
    assert engine.steps == steps
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'finished_reason="abort",model_name="m"}} {float(engine.aborted)}' in metrics
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_goes_away_while_queued_is_aborted(server: RunningServer, stream: bool, path: str) -> None:
    """H035: gone before the first token."""
    engine = server.engine
    engine.queued = asyncio.Event()
    body = {**LONG, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    with raw_request(server.url, path, body):
        until(lambda: engine.waiting == 1)
    until(lambda: engine.waiting == 0)
    assert engine.aborted == 1
    assert engine.steps == 0


def test_shared_ids_in_flight_keep_their_own_text(server: RunningServer) -> None:
    """H036: two requests with one id overlap; each gets its own text."""
    server.engine.reply = lambda request, choice: [request.prompt_token_ids[-1]] * 2000

    async def ask(client: httpx.AsyncClient, letter: str) -> str:
        body = {"prompt": letter, "max_tokens": 30}
        reply = await client.post("/v1/completions", json=body, headers={"X-Request-Id": "id"})
        assert reply.status_code == 200
        return str(reply.json()["choices"][0]["text"])

    async def both() -> list[str]:
        async with httpx.AsyncClient(base_url=server.url) as client:
            return await asyncio.gather(ask(client, "P"), ask(client, "Q"))

    assert asyncio.run(both()) == ["P" * 30, "Q" * 30]


def test_an_oversized_header_is_refused(server: RunningServer) -> None:
    """H036: a 1 MB id over a socket."""
    with raw_request(server.url, "/v1/completions", LONG) as sock:
        pass
    with socket.create_connection(tuple(server.url.removeprefix("http://").split(":")), timeout=5) as sock:  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"x" * 1_000_000 + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert sock.recv(4096).startswith(b"HTTP/1.1 4")
    assert httpx.get(f"{server.url}/health").status_code == 200


def client_of(server: RunningServer, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=5, **options)


def test_the_official_client_reads_every_answer(server: RunningServer) -> None:
    server.engine.reply = says("Hello")
    client = client_of(server)
    messages: Any = [{"role": "user", "content": "hi"}]
    whole = client.chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == "Hello"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].bytes == [97]  # type: ignore[index]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    chunks = list(
        client.chat.completions.create(
            model="m", messages=messages, stream=True, stream_options={"include_usage": True}, extra_body={"top_k": 5}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6
    text = client.completions.create(model="m", prompt="hi", max_tokens=10, logprobs=1, echo=True)
    assert text.choices[0].text == "hiHello"
    assert [model.id for model in client.models.list()] == ["m"]


def test_the_official_client_raises_its_own_errors(server: RunningServer) -> None:
    client = client_of(server)
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.completions.create(model="other", prompt="hi")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="m", prompt="hi", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    server.engine.fails_after = 2
    with pytest.raises(openai.APIError, match="engine process"):
        list(client.completions.create(model="m", prompt="hi", stream=True))


def test_running_requests_finish_before_the_end() -> None:
    """SIGTERM's path: new requests get 503, the running one gets all of its text, then the process ends."""
    engine = FakeEngine(step_s=0.02)
    with (
        RunningServer(engine) as server,
        raw_request(server.url, "/v1/completions", {**LONG, "max_tokens": 40, "stream": True}) as sock,
    ):
        until(lambda: engine.running == 1)
        server.stop()
        until(lambda: engine.drained)
        late = httpx.post(f"{server.url}/v1/completions", json=LONG)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "shutting_down"
        answer = b""
        while data := sock.recv(65536):
            answer += data
    assert answer.count(b'"text":"a"') == 40
    assert b"[DONE]" in answer
    assert engine.closed
    assert engine.template.closed


def test_the_end_does_not_wait_longer_than_allowed() -> None:
    engine = FakeEngine(step_s=0.05, max_model_len=100_000)
    begin = time.monotonic()
    with RunningServer(engine, {"shutdown_timeout": 0.2}) as server, raw_request(server.url, "/v1/completions", LONG):
        until(lambda: engine.running == 1)
        server.stop()
        server._thread.join(8)
        assert not server._thread.is_alive()
    assert time.monotonic() - begin < 8
    assert engine.closed


def test_a_port_in_use_is_an_error_before_the_model_is_loaded() -> None:
    loaded = False

    async def load() -> FakeEngine:
        nonlocal loaded
        loaded = True
        return FakeEngine()

    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        settings = ServeSettings(host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=f"port {port} .* in use") as error:
            asyncio.run(serve(settings, "m", load, make_renderer=no_template, on_ready=lambda *_: None))
    assert error.value.exit_code == 2
    assert not loaded


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--host"):
        bind("203.0.113.7", 0)
    with pytest.raises(ConfigError, match="--host"):
        bind("no such host", 0)


def test_a_model_that_does_not_load_ends_the_server() -> None:
    async def load() -> FakeEngine:
        raise ModelNotFoundError("there is no model")

    settings = ServeSettings(host="127.0.0.1", port=0)
    with pytest.raises(ModelNotFoundError):
        asyncio.run(serve(settings, "m", load, make_renderer=no_template, on_ready=lambda *_: None))


async def test_requests_while_loading_get_503() -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    stop, ready = asyncio.Event(), asyncio.Event()
    engine = FakeEngine()
    release = asyncio.Event()

    async def load() -> FakeEngine:
        await release.wait()
        return engine

    task = asyncio.create_task(
        serve(
            ServeSettings(host="127.0.0.1", port=port),
            "m",
            load,
            make_renderer=no_template,
            on_ready=lambda *_: ready.set(),
            stop=stop,
        )
    )
    async with _patient(f"http://127.0.0.1:{port}") as client:
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "loading"
        release.set()
        await asyncio.wait_for(ready.wait(), 5)
        assert (await client.get("/health")).status_code == 200
    stop.set()
    await asyncio.wait_for(task, 5)


@contextlib.asynccontextmanager
async def _patient(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, transport=httpx.AsyncHTTPTransport(retries=3)) as client:
        yield client


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_too_much_reads_why(chunked: bool) -> None:
    """H050: over a socket, where an early close would be a reset connection."""
    with RunningServer(FakeEngine(), {"max_body_bytes": 1 << 20}) as server:
        body = b" " * (3 << 20)
        content = iter([body[i : i + 65536] for i in range(0, len(body), 65536)]) if chunked else body
        reply = httpx.post(f"{server.url}/v1/completions", content=content, timeout=10)
        assert reply.status_code == 413
        assert reply.json()["error"]["code"] == "request_too_large"
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
