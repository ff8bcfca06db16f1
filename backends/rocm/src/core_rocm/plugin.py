"""Announces the backend. Imports neither torch nor Triton: listing must be cheap and safe."""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo
from core_triton import simulation

__all__ = ["core_backends"]

hookimpl = pluggy.HookimplMarker("core")


@hookimpl
def core_backends() -> list[BackendInfo]:
    """The one backend of this package."""
    return [
        BackendInfo(
            name="rocm",
            vendor="AMD",
            api=(1, 0, 0),
            load="core_rocm.backend:RocmBackend",
            env=simulation.environment("hip"),
            priority=-1,
            remedy=simulation.refusal("hip") or "check that the driver is loaded",
        )
    ]
