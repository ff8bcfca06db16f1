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
            name="cuda",
            vendor="NVIDIA",
            api=(1, 0, 0),
            load="core_cuda.backend:CudaBackend",
            env=simulation.environment("cuda"),
            priority=-1,
            remedy=simulation.refusal("cuda") or "check that the driver is loaded",
        )
    ]
