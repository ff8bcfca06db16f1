"""Fixtures of the server's tests: a fake engine behind the real application, spoken to without a socket."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from core.serve.app import build_app
from core.serve.prompts import ChatRenderer
from core.serve.settings import ServeSettings
from core.serve.state import ServerState

Connect = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@asynccontextmanager
async def _connect(engine: FakeEngine | None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings.setdefault("served_model_names", ("m",))
    renderer = ChatRenderer(engine.template) if engine is not None else None
    state = ServerState(ServeSettings(**settings), "models/m", engine, renderer)
    transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=10) as client:
        client.state = state  # type: ignore[attr-defined]
        yield client


@pytest.fixture
def connect() -> Connect:
    return _connect


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with _connect(engine) as client:
        yield client


def events_of(response: httpx.Response) -> list[Any]:
    """The data of every event; `[DONE]` stays a string."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def events() -> Callable[[httpx.Response], list[Any]]:
    return events_of
