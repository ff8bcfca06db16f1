"""`core serve`: the engine's process first, everything else while that one imports."""

from __future__ import annotations

import importlib
import logging

import msgspec

from core.config import EngineConfig
from core.engine.child import EarlyProcess
from core.serve.settings import ServeSettings

__all__ = ["run_server"]


def run_server(config: EngineConfig, settings: ServeSettings) -> None:
    """Serves until a signal.

    Raises:
        CoreError: the port is taken, `--chat-template` names no readable file, or the model cannot be served.
    """
    if settings.chat_template is not None:  # read now, and not after the minutes that a model takes to load
        from core.text.chat_template import read_template

        settings = msgspec.structs.replace(settings, chat_template=read_template(settings.chat_template))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("core.serve").setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    with EarlyProcess.start(config) as early:
        importlib.import_module("core.cli.serve_loop").run_loop(early, settings)
