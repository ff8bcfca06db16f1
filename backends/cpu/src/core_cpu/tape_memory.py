"""Memory of recorded steps: what a kernel writes its result into while a step is recorded, and otherwise."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["TapeMemory", "allocating_from", "empty"]

_ALIGNMENT = 64
_CHUNK_BYTES = 2**20


class TapeMemory:
    """Memory of the tensors that a step allocates while it is recorded.

    All recordings share it: they run one at a time.

    A replay runs the calls in the order of the recording. So a tensor that Python dropped while it recorded is dead at
    that point of every replay too, and its memory serves later tensors: a step of 30 layers needs that of one.
    """

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._free: list[list[tuple[int, int]]] = []
        """For each chunk its free ranges [start, end), in order, none touching another."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of undefined contents. Its memory comes back once neither it nor a view of it is left."""
        size = math.prod(shape) * dtype.itemsize
        part = self._part(max(_ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT))
        return torch.from_numpy(part)[:size].view(dtype).view(tuple(shape))

    def _part(self, size: int) -> npt.NDArray[np.uint8]:
        for index, ranges in enumerate(self._free):
            for place, (start, end) in enumerate(ranges):
                if end - start >= size:
                    ranges[place : place + 1] = [(start + size, end)] if end - start > size else []
                    return self._lend(index, start, size)
        length = max(size, _CHUNK_BYTES)
        memory = np.zeros(length + _ALIGNMENT, dtype=np.uint8)
        skip = -memory.ctypes.data % _ALIGNMENT
        self._chunks.append(memory[skip : skip + length])
        self._free.append([(size, length)] if length > size else [])
        return self._lend(len(self._chunks) - 1, 0, size)

    def _lend(self, index: int, start: int, size: int) -> npt.NDArray[np.uint8]:
        part = self._chunks[index][start : start + size]
        # A tensor made of an array holds the array, and so does every view of the tensor: the array dies with the last.
        weakref.finalize(part, self._give_back, index, start, start + size).atexit = False
        return part

    def _give_back(self, index: int, start: int, end: int) -> None:
        ranges = sorted([*self._free[index], (start, end)])
        merged = [ranges[0]]
        for begin, stop in ranges[1:]:
            if begin == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((begin, stop))
        self._free[index] = merged


class _Recorder(threading.local):
    """What this thread records into; None where it does not."""

    memory: TapeMemory | None = None


_recorder = _Recorder()


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of undefined contents for the result of a kernel."""
    memory = _recorder.memory
    return torch.empty(shape, dtype=dtype) if memory is None else memory.take(shape, dtype)


@contextmanager
def allocating_from(memory: TapeMemory) -> Iterator[None]:
    """While open, `empty` of this thread takes from `memory`."""
    assert _recorder.memory is None, "this thread is recording already"
    _recorder.memory = memory
    try:
        yield
    finally:
        _recorder.memory = None
