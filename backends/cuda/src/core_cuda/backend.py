"""NVIDIA GPUs as a backend."""

from __future__ import annotations

from core_cuda import driver
from core_triton.backend import TritonBackend
from core_triton.probing import Found

__all__ = ["CudaBackend"]


class CudaBackend(TritonBackend):
    """Every NVIDIA GPU of this machine that the kernels are built for, or those that are simulated."""

    family = "cuda"

    def look(self) -> Found:
        return driver.look()
