"""NVIDIA GPUs as a backend."""

from __future__ import annotations

from core.spec import DeviceInfo
from core_triton.backend import TritonBackend

__all__ = ["CudaBackend"]


class CudaBackend(TritonBackend):
    """Every NVIDIA GPU of this machine."""

    family = "cuda"

    def find_devices(self) -> list[DeviceInfo]:
        return []
