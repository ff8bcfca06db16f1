"""One NPU as torch_npu drives it: memory, copies, events, graphs. The simulation puts its own in place of it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.backend import BackendUnavailableError, MemoryInfo, Pending
from core_ascend.vendor import npu

__all__ = ["Device", "Npu", "Recording"]


class Recording(abc.ABC):
    """A captured step, in the words of `torch.npu.NPUGraph`."""

    @abc.abstractmethod
    def update(self, cpu_update_input: Sequence[dict[str, list[int]]]) -> None:
        """New host lists, one entry for each call that takes some, in the order of the capture."""

    @abc.abstractmethod
    def replay(self) -> None:
        """Runs the step."""


class Device(abc.ABC):
    """What the backend asks of a device.

    Attributes:
        device: As torch names it.
        pinned: Whether page-locked host memory makes copies asynchronous.
        transport: Backend of torch.distributed.
    """

    device: torch.device
    pinned: bool
    transport: str

    @abc.abstractmethod
    def memory(self) -> MemoryInfo:
        """Memory now."""

    @abc.abstractmethod
    def reset_peak(self) -> None:
        """Starts the peak anew."""

    @abc.abstractmethod
    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Starts a copy to the host."""

    @abc.abstractmethod
    def fence(self) -> Pending:
        """Done when all work submitted so far is."""

    @abc.abstractmethod
    def new_recording(self) -> Recording:
        """An empty graph."""

    @abc.abstractmethod
    def capturing(self, recording: Recording) -> AbstractContextManager[Any]:
        """Captures what is called inside of it; calls that take host lists stay open for new ones."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until the device is idle."""

    def new_group(self, ranks: Sequence[int], tag: str) -> dist.ProcessGroup:
        """A process group over the device's transport."""
        group = dist.new_group(list(ranks), backend=self.transport, group_desc=tag)
        assert isinstance(group, dist.ProcessGroup)
        return group


class _Event(Pending):
    """What the current stream held when it was made.

    Args:
        keep: What must live until then.
    """

    __slots__ = ("_event", "_keep")

    def __init__(self, event: Any, keep: Any = None) -> None:
        self._event = event
        self._keep = keep

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class Npu(Device):
    """The real thing.

    Args:
        index: Which one.

    Raises:
        BackendUnavailableError: torch_npu or the SDK below it does not load, or the device cannot be taken.
    """

    pinned = True
    transport = "hccl"

    def __init__(self, index: int) -> None:
        try:
            vendor = npu()
        except Exception as error:
            raise BackendUnavailableError(
                f"torch_npu cannot be imported ({_last_line(error)}); `source` CANN's set_env.sh, and take "
                "the torch_npu whose version fits torch and CANN"
            ) from error
        # Fractal formats are an internal matter of torch_npu unless they are allowed by name.
        vendor.npu.config.allow_internal_format = True
        vendor.npu.set_compile_mode(jit_compile=False)
        self._npu = vendor.npu
        self._pool: Any = None
        self.device = torch.device("npu", index)
        try:
            self._npu.set_device(index)
            self._npu.synchronize(index)
        except Exception as error:
            raise BackendUnavailableError(
                f"npu:{index} cannot be taken ({_last_line(error)}); `npu-smi info` says who holds it and how it is"
            ) from error

    def memory(self) -> MemoryInfo:
        free, total = self._npu.mem_get_info(self.device)
        reserved, peak = self._npu.memory_reserved(self.device), self._npu.max_memory_reserved(self.device)
        return MemoryInfo(free=free, total=total, reserved=reserved, peak=peak)

    def reset_peak(self) -> None:
        self._npu.reset_peak_memory_stats(self.device)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        target.copy_(tensor, non_blocking=True)
        return target, self._event(tensor)

    def fence(self) -> Pending:
        return self._event()

    def _event(self, keep: Any = None) -> Pending:
        event = self._npu.Event()
        event.record(self._npu.current_stream(self.device))
        return _Event(event, keep)

    def new_recording(self) -> Recording:
        graph: Recording = self._npu.NPUGraph()
        return graph

    def capturing(self, recording: Recording) -> AbstractContextManager[Any]:
        if self._pool is None:
            self._pool = self._npu.graph_pool_handle()
        context: AbstractContextManager[Any] = self._npu.graph(recording, pool=self._pool, auto_dispatch_capture=True)
        return context

    def synchronize(self) -> None:
        self._npu.synchronize(self.device)


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
