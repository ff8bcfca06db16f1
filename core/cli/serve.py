"""`core serve`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import sys
from collections.abc import Callable

import msgspec

from core.config import EngineConfig
from core.engine.async_engine import AsyncEngine
from core.errors import CoreError
from core.serve.interface import ServedEngine
from core.serve.settings import ServeSettings
from core.text.chat_template import read_template

__all__ = ["run_server"]


def run_server(config: EngineConfig, settings: ServeSettings) -> None:
    """Serves until a signal.

    Raises:
        CoreError: the port is taken, `--chat-template` names no readable file, or the model cannot be served.
    """
    if settings.chat_template is not None:  # read now, and not after the minutes that a model takes to load
        settings = msgspec.structs.replace(settings, chat_template=read_template(settings.chat_template))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("core.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(config, settings))


async def _serve(config: EngineConfig, settings: ServeSettings) -> None:
    """Starts the engine's process first: it imports and loads while this one imports the HTTP server."""
    starting = asyncio.ensure_future(AsyncEngine.start(config))

    async def start() -> ServedEngine:
        return await starting

    def ready(engine: ServedEngine, url: str, seconds: float) -> None:
        sys.stderr.write(f"ready: {config.model} on {engine.facts.resolved} at {url} in {seconds:.1f} s\n")
        sys.stderr.flush()

    try:
        chat_template = await asyncio.to_thread(importlib.import_module, "core.serve.chat_template")
        server = await asyncio.to_thread(importlib.import_module, "core.serve.server")
        await server.serve(
            settings,
            config.model,
            start,
            make_renderer=lambda engine: chat_template.chat_renderer(engine, settings),
            on_ready=ready,
            scheduling_policy=config.scheduler.scheduling_policy,
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
