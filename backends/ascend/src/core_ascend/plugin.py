"""Announces the backend. Imports neither torch nor torch_npu: listing must be cheap and safe."""

from __future__ import annotations

import pluggy

from core.spec import BackendInfo
from core_ascend import machine

__all__ = ["ENVIRONMENT", "core_backends"]

hookimpl = pluggy.HookimplMarker("core")

ENVIRONMENT = {"TORCH_NPU_FALLBACK_CPU_DISABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""An operation without an NPU kernel raises and never runs on the host unseen; torch_npu is imported by `open`, so that
a broken SDK breaks no `import torch`."""


@hookimpl
def core_backends() -> list[BackendInfo]:
    """The one backend of this package. Chosen by `--device auto` only where the kernel driver shows an NPU."""
    real = machine.has_nodes() and not machine.simulated_socs()
    return [
        BackendInfo(
            name="ascend",
            vendor="Huawei",
            api=(1, 0, 0),
            load="core_ascend.backend:AscendBackend",
            env=ENVIRONMENT,
            priority=10 if real else -1,
            remedy=machine.problem() or "see `npu-smi info`",
        )
    ]
