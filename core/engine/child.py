"""The engine's process as it is started: before anything else, so that it imports while its parent still does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from core import plugins
from core.config import EngineConfig

__all__ = ["IMPORT_AHEAD", "EarlyProcess", "choose_device", "start_process"]

IMPORT_AHEAD = "--import-ahead"
"""Tells the process to import what runs a device before it knows what it will serve."""

# Imports make objects that stay, so that collections in between are for nothing; `main` starts them.
_BOOTSTRAP = (
    "import gc, json, sys; gc.disable(); sys.path[:] = json.loads(sys.argv[1]); "
    "from core.engine.process import main; main()"
)


@dataclass(frozen=True, slots=True)
class EarlyProcess:
    """A process that waits for its launch message, started for a device. A context manager: its end is the process's.

    Args:
        config: What it was started for, with the device by name.
        env: Environment that it started with, over this process's.
        process: The process; it ends when its standard input closes.
    """

    config: EngineConfig
    env: Mapping[str, str]
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, config: EngineConfig) -> Self:
        """Finds the device and starts the process for it.

        Raises:
            BackendNotFoundError: no such backend is installed.
            BackendUnavailableError: it is installed and cannot be used.
        """
        config, env = choose_device(config)
        return cls(config, env, start_process(env, import_ahead=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process where whoever took it has not."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def choose_device(config: EngineConfig) -> tuple[EngineConfig, Mapping[str, str]]:
    """The configuration with its device by name, and the environment that the device's process must start with.

    Raises:
        BackendNotFoundError: no such backend is installed.
        BackendUnavailableError: it is installed and cannot be used.
    """
    listing, index = plugins.choose_device(config.device)
    assert listing.info is not None
    return msgspec.structs.replace(config, device=f"{listing.info.name}:{index}"), listing.info.env


def start_process(env: Mapping[str, str], *, import_ahead: bool) -> subprocess.Popen[bytes]:
    """A process that waits for a launch message on its standard input.

    Args:
        env: Set before its first import, over this process's environment.
        import_ahead: Whether it imports what runs a device meanwhile.
    """
    ahead = [IMPORT_AHEAD] if import_ahead else []
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *ahead],
        stdin=subprocess.PIPE,
        env={**os.environ, **env},
        start_new_session=True,
    )
