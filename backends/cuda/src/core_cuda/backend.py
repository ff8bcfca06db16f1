"""NVIDIA GPUs as a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.backend import Verdict
from core.backend.ops import AttentionOp, OpSpec
from core.spec import DeviceInfo
from core_cuda import driver, providers
from core_triton.backend import TritonBackend
from core_triton.probing import Found

__all__ = ["CudaBackend"]


class CudaBackend(TritonBackend):
    """Every NVIDIA GPU of this machine that the kernels are built for, or those that are simulated."""

    family = "cuda"

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return (providers.FLASH_BLOCK_SIZE,) if providers.chosen() else super().block_sizes

    def look(self) -> Found:
        return driver.look()

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        verdict = super().supports(op, device)
        if isinstance(op, AttentionOp) and providers.chosen() and verdict.kind != "NO":
            return providers.verdict(op)
        return verdict

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        if isinstance(op, AttentionOp) and providers.chosen():
            return self.launched(providers.bind(op))
        return super().bind(op)
