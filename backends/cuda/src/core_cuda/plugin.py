"""Announces the backend. Imports neither torch nor Triton: listing must be cheap and safe."""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo
from core_cuda import driver
from core_triton import simulation

__all__ = ["core_backends"]

hookimpl = pluggy.HookimplMarker("core")


@hookimpl
def core_backends() -> list[BackendInfo]:
    """The one backend of this package; `--device auto` takes it where a driver is, and never a simulated device."""
    simulated = bool(simulation.wished("cuda"))
    return [
        BackendInfo(
            name="cuda",
            vendor="NVIDIA",
            api=(1, 0, 0),
            load="core_cuda.backend:CudaBackend",
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **simulation.environment("cuda")},
            priority=-1 if simulated or driver.absence() else 10,
            remedy="it needs NVIDIA's driver and a build of torch for CUDA",
        )
    ]
