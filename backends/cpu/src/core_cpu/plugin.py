"""Announces the backend. Imports neither torch nor the kernels: listing must be cheap and safe."""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo

__all__ = ["core_backends"]

hookimpl = pluggy.HookimplMarker("core")


@hookimpl
def core_backends() -> list[BackendInfo]:
    """The one backend of this package; the last choice of `--device auto`."""
    return [
        BackendInfo(
            name="cpu",
            vendor="any",
            api=(1, 0, 0),
            load="core_cpu.backend:CpuBackend",
            priority=0,
            remedy="it needs nothing but its own extension; reinstall core-backend-cpu",
        )
    ]
