"""AMD GPUs as a backend."""

from __future__ import annotations

from core_rocm import driver
from core_triton.backend import TritonBackend
from core_triton.probing import Found

__all__ = ["RocmBackend"]


class RocmBackend(TritonBackend):
    """Every AMD GPU of this machine that the kernels are built for, or those that are simulated."""

    family = "hip"

    def look(self) -> Found:
        return driver.look()
