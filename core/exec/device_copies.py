"""Host arrays on their way to the device."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend import Backend, Pending

__all__ = ["DeviceCopies"]


class DeviceCopies:
    """Brings small arrays to the device in stream order and keeps each source until its copy is done.

    Args:
        backend: Opened.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._in_flight: deque[tuple[Pending, Tensor]] = deque()

    @property
    def device(self) -> torch.device:
        """Where the arrays go."""
        return self._backend.device

    def put(self, array: npt.NDArray[np.generic]) -> Tensor:
        """The array as a device tensor; where host and device share memory it is the array itself."""
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self._backend.capabilities.unified_memory:
            return source
        target = torch.empty(source.shape, dtype=source.dtype, device=self._backend.device)
        self._in_flight.append((self._backend.to_device(source, target), source))
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
        return target
