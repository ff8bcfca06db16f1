"""Announces the backend. Imports neither torch nor Triton: listing must be cheap and safe."""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo
from core_rocm import driver
from core_triton import simulation

__all__ = ["core_backends"]

hookimpl = pluggy.HookimplMarker("core")


@hookimpl
def core_backends() -> list[BackendInfo]:
    """The one backend of this package; `--device auto` takes it where a driver is, and never a simulated device."""
    simulated = bool(simulation.wished("hip"))
    return [
        BackendInfo(
            name="rocm",
            vendor="AMD",
            api=(1, 0, 0),
            load="core_rocm.backend:RocmBackend",
            env=simulation.environment("hip"),
            priority=-1 if simulated or driver.absence() else 10,
            remedy="it needs AMD's driver and a build of torch for ROCm",
        )
    ]
