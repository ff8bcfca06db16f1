"""Announces the backend. Imports neither torch nor the kernels: listing must be cheap and safe."""

from __future__ import annotations

import os

import pluggy

from core.spec import BackendInfo

__all__ = ["core_backends", "environment"]

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
            env=environment(),
            priority=0,
            remedy="it needs nothing but its own extension; reinstall core-backend-cpu",
        )
    ]


def environment() -> dict[str, str]:
    """Threads of torch's own, which loading still uses, sleep while they wait: spinning, they hold a core that the
    kernels' threads, or other processes, wait for. What the operator has set stands."""
    return {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE"}
