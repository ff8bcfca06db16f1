"""What a caller may choose about L4."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["SOAK_SECONDS", "ServedOptions"]

SOAK_SECONDS = 8.0
"""Enough to see a leak of blocks, descriptors or threads; one of memory needs minutes."""


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """How L4 serves.

    Args:
        model: Folder of a real checkpoint for the accuracy checks; None takes the suite's copy model.
        soak_seconds: How long the soak goes on.
        start_seconds: Patience with a server that loads.
        command: What stands before `serve MODEL`; tests of the suite plant servers with a bug here.
        environment: Over this process's, for the server.
    """

    model: Path | None = None
    soak_seconds: float = SOAK_SECONDS
    start_seconds: float = 300.0
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "core.cli")
    environment: Mapping[str, str] = field(default_factory=dict)
