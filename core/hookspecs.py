"""Hooks that a plugin package may implement. They only discover; nothing on a step's path is a hook.

A package announces one module or object in the entry-point group `core.backends`. That module must import neither torch
nor the vendor's SDK: listing every installed backend costs milliseconds and breaks on nobody's driver.
"""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo, ConformanceCase, ModelEntry

__all__ = ["ENTRY_POINT_GROUP", "PROJECT", "hookimpl", "hookspec"]

PROJECT = "core"
"""Name of pluggy's project; a package makes its own `HookimplMarker` with it."""
ENTRY_POINT_GROUP = "core.backends"
"""Entry-point group in which packages announce their plugin."""

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks a function of this file as the specification of a hook."""
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as an implementation of a hook of the same name."""


@hookspec
def core_backends() -> list[BackendInfo]:  # type: ignore[empty-body]
    """Backends that the package brings. Required; cheap, and without importing torch or an SDK."""


@hookspec
def core_models() -> list[ModelEntry]:  # type: ignore[empty-body]
    """Model architectures that the package brings. Optional."""


@hookspec
def core_conformance_cases(backend: str) -> list[ConformanceCase]:  # type: ignore[empty-body]
    """Further cases of the conformance suite for one of the package's backends. Optional.

    Args:
        backend: Name of the backend under test.
    """
