"""`core serve` once its engine's process runs: one event loop for the HTTP server and the engine's client."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Callable

from core.engine.async_engine import AsyncEngine
from core.engine.child import EarlyProcess
from core.engine.heap import collections_paused, keep_heap
from core.errors import CoreError
from core.serve.interface import ServedEngine
from core.serve.settings import ServeSettings

__all__ = ["run_loop"]


def run_loop(early: EarlyProcess, settings: ServeSettings) -> None:
    """Serves until a signal.

    Raises:
        CoreError: the port is taken, or the model cannot be served.
    """
    with collections_paused(), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(early, settings))


async def _serve(early: EarlyProcess, settings: ServeSettings) -> None:
    """Starts the engine first: its process loads while this one imports the HTTP server."""
    starting = asyncio.ensure_future(AsyncEngine.start(early.config, early=early))

    async def start() -> ServedEngine:
        return await starting

    def ready(engine: ServedEngine, url: str, seconds: float) -> None:
        sys.stderr.write(f"ready: {early.config.model} on {engine.facts.resolved} at {url} in {seconds:.1f} s\n")
        sys.stderr.flush()
        keep_heap()

    try:
        chat_template = await asyncio.to_thread(importlib.import_module, "core.serve.chat_template")
        server = await asyncio.to_thread(importlib.import_module, "core.serve.server")
        await server.serve(
            settings,
            early.config.model,
            start,
            make_renderer=lambda engine: chat_template.chat_renderer(engine, settings),
            on_ready=ready,
            scheduling_policy=early.config.scheduler.scheduling_policy,
        )
    finally:
        starting.cancel()  # where the port was taken; no effect once the engine is up
        with contextlib.suppress(asyncio.CancelledError, CoreError):
            await starting


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: a streamed token takes less time with it."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
