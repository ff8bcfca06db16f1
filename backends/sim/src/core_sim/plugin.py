"""Announces the backend. Imports neither torch nor an SDK: listing must be cheap and safe."""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo, ConformanceCase

__all__ = ["core_backends", "core_conformance_cases"]

hookimpl = pluggy.HookimplMarker("core")


@hookimpl
def core_backends() -> list[BackendInfo]:
    """The one backend of this package."""
    return [
        BackendInfo(
            name="sim",
            vendor="core-inference (simulated)",
            api=(1, 0, 0),
            load="core_sim.backend:SimBackend",
            priority=-1,
            remedy="it needs nothing but torch; reinstall core-backend-sim",
        )
    ]


@hookimpl
def core_conformance_cases(backend: str) -> list[ConformanceCase]:
    """What is special about this chip and no other: its strictness is the reason that it exists."""
    names = ("late-copies", "poisoned-memory")
    return [ConformanceCase(id=f"sim/{n}", load=f"core_sim.cases:{n.replace('-', '_')}") for n in names]
