"""`core serve`."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from collections.abc import Callable

import msgspec

from core.config import EngineConfig
from core.engine.async_engine import AsyncEngine
from core.serve.chat_template import chat_renderer
from core.serve.interface import ServedEngine
from core.serve.server import serve
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

    async def start() -> ServedEngine:
        return await AsyncEngine.start(config)

    def ready(engine: ServedEngine, url: str, seconds: float) -> None:
        sys.stderr.write(f"ready: {config.model} on {engine.facts.resolved} at {url} in {seconds:.1f} s\n")
        sys.stderr.flush()

    policy = config.scheduler.scheduling_policy
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(
            serve(
                settings,
                config.model,
                start,
                make_renderer=lambda engine: chat_renderer(engine, settings),
                on_ready=ready,
                scheduling_policy=policy,
            )
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed: a streamed token takes less time with it."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
