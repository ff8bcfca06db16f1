"""Host arrays on their way to the device."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend import Backend, Pending

__all__ = ["DeviceBuffer", "DeviceCopies"]

Int32Array = npt.NDArray[np.int32]


class DeviceCopies:
    """Brings small arrays to the device in stream order and keeps each source until its copy is done.

    Args:
        backend: Opened.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._in_flight: deque[tuple[Pending, Tensor]] = deque()
        self.unified = backend.capabilities.unified_memory
        """Whether the device reads host arrays where they lie."""
        self.in_place = self.unified and backend.device.type == "cpu"
        """Whether it also computes in the thread that calls it, so that an array may be written between two calls."""

    def host_view(self, tensor: Tensor) -> Int32Array:
        """The memory of a device tensor, where it is also the host's (`in_place`); of no elements elsewhere."""
        return tensor.numpy() if self.in_place else np.empty(0, dtype=np.int32)

    def zeros(self, *shape: int) -> Tensor:
        """Device memory, int32."""
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where the arrays go."""
        return self._backend.device

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """The array as a device tensor; where host and device share memory it is the array itself."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self.unified:
            return source
        target = torch.empty(source.shape, dtype=source.dtype, device=self._backend.device)
        self._send(source, target)
        return target

    def send(self, array: npt.NDArray[np.generic], target: Tensor) -> None:
        """Copies a fresh array, which nobody writes any more, into a device tensor of its shape."""
        self._send(torch.from_numpy(array), target)

    def _send(self, source: Tensor, target: Tensor) -> None:
        self._in_flight.append((self._backend.to_device(source, target), source))
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()


class DeviceBuffer:
    """Device memory of fixed address, int32, of which a step's rows are written anew.

    Args:
        copies: To the device.
        tensor: That memory, contiguous: most rows, and the shape of a row.
    """

    def __init__(self, copies: DeviceCopies, tensor: Tensor) -> None:
        self.tensor = tensor
        self._copies = copies
        self._host = copies.host_view(self.tensor)
        self.memory = self._host.data
        """The same memory for single numbers, where the host writes it in place."""

    def fill(self, rows: Int32Array, count: int, padding: Any, columns: int | None = None) -> None:
        """Writes `rows` and then `padding` up to row `count`.

        Args:
            padding: A number, or rows that broadcast to those that are left.
            columns: Of a row, how many are written; `rows` may have fewer, the rest are 0.
        """
        where = slice(count) if columns is None else (slice(count), slice(columns))
        in_place = self._copies.in_place
        target = self._host[where] if in_place else np.zeros(self.tensor[where].shape, dtype=np.int32)
        if columns is None:
            target[: len(rows)] = rows
        else:
            target[: len(rows), : rows.shape[1]] = rows
            target[: len(rows), rows.shape[1] :] = 0
        if len(rows) < count:
            target[len(rows) :] = padding
        if not in_place:
            self._copies.send(target, self.tensor[where])
