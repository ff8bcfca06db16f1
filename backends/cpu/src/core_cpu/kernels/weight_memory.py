"""Memory of packed weights: in large pages where the system has them, since each step reads all of it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from core_cpu import _kernels

__all__ = ["MEMORY", "WeightMemory"]

_ALIGNMENT = 64


class WeightMemory:
    """Hands out parts of large pieces of memory.

    A matrix of a small model is smaller than a large page, so that each in an allocation of its own would get none. A
    piece is given back when no part of it is left; the last one stays, its used parts too, until a weight does not fit.

    Args:
        chunk_bytes: Bytes of a piece. What no weight has used of it is not touched, but for the rest of a large page.
    """

    def __init__(self, chunk_bytes: int = 2**26) -> None:
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes], uint8, undefined contents, aligned to 64 bytes."""
        with self._lock:
            if self._rest.numel() < num_bytes:
                self._rest = _new_chunk(max(num_bytes, self._chunk_bytes))
            part = self._rest[:num_bytes]
            self._rest = self._rest[-(-num_bytes // _ALIGNMENT) * _ALIGNMENT :]
            return part


def _new_chunk(num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    _kernels.advise_huge_pages(memory.data_ptr(), memory.numel())
    skip = -memory.data_ptr() % _ALIGNMENT
    return memory[skip : skip + num_bytes]


MEMORY = WeightMemory()
"""The process's."""
