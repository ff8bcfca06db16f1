"""The simulated device: CPU memory, late copies, and graphs that keep the calls of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.backend import MemoryInfo, Pending
from core_ascend.device import Device, Recording
from core_ascend.simulation.faults import need

__all__ = ["SimulatedNpu"]

_MEMORY_BYTES = 2**30
_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero"})
_LISTED = frozenset({"npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"})
"""Calls whose host lists a graph takes anew."""


class _Call:
    """One call of a captured step, with its very tensors."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self.func, self.args, self.kwargs = func, args, dict(kwargs)
        self.result = None if func._schema.is_mutable else result
        self.waits = func._schema.name in _LISTED
        self.fresh = False

    def run(self) -> None:
        need(not self.waits or self.fresh, f"{self.func._schema.name}: replayed without new host lists, it would hang")
        self.fresh = False
        _overwrite(self.result, self.func(*self.args, **self.kwargs))


class SimulatedRecording(Recording):
    """A captured step."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def update(self, cpu_update_input: Sequence[dict[str, list[int]]]) -> None:
        waiting = [call for call in self.calls if call.waits]
        inputs = list(cpu_update_input)
        if len(inputs) == 1:
            inputs = inputs * len(waiting)
        need(len(inputs) == len(waiting), f"{len(inputs)} updates for {len(waiting)} calls that take host lists")
        for call, lists in zip(waiting, inputs, strict=True):
            # Names that the call was not made with are passed over, as torch_npu does: the old list stays.
            call.kwargs.update({name: list(value) for name, value in lists.items() if name in call.kwargs})
            call.fresh = True

    def replay(self) -> None:
        for call in self.calls:
            call.run()


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: SimulatedRecording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            # In inference mode compound calls arrive whole; their parts are what a device would see.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name
        need(name not in _HOST_READS, f"the host reads the device while a graph is captured ({name})")
        result = func(*args, **kwargs)
        returns = func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view:
            copied = {key: list(value) if isinstance(value, list) else value for key, value in kwargs.items()}
            self._recording.calls.append(_Call(func, args, copied, result))
            # What a capture computes is not what memory holds afterwards.
            _spoil(None if func._schema.is_mutable else result)
        return result


class _LateCopy(Pending):
    """A copy to the host that arrives when it is waited for."""

    __slots__ = ("_source", "_target")

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source: Tensor | None = source
        self._target = target

    def done(self) -> bool:
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            self._target.copy_(self._source)
            self._source = None


class SimulatedNpu(Device):
    """Stands in for `core_ascend.device.Npu`.

    Args:
        libraries: Registrations of the numerics, which live as long as they are held.
    """

    pinned = False
    transport = "gloo"

    def __init__(self, libraries: Sequence[Any]) -> None:
        self.device = torch.device("cpu")
        self._libraries = libraries

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free=_MEMORY_BYTES, total=_MEMORY_BYTES, reserved=0, peak=0)

    def reset_peak(self) -> None:
        pass

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        target = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        target.view(-1).view(torch.uint8).fill_(0xFF)
        return target, _LateCopy(tensor.clone(), target)

    def fence(self) -> Pending:
        return Pending()

    def new_recording(self) -> Recording:
        return SimulatedRecording()

    @contextmanager
    def capturing(self, recording: Recording) -> Iterator[None]:
        assert isinstance(recording, SimulatedRecording)
        with _Recorder(recording):
            yield

    def synchronize(self) -> None:
        pass


def _overwrite(target: Any, source: Any) -> None:
    _for_each(target, source, lambda a, b: None if a is b else a.copy_(b))


def _spoil(target: Any) -> None:
    _for_each(target, target, lambda a, _: a.fill_(float("nan") if a.is_floating_point() else 0))


def _for_each(target: Any, source: Any, act: Callable[[Tensor, Tensor], Any]) -> None:
    if isinstance(target, Tensor):
        act(target, source)
    elif isinstance(target, list | tuple):
        for one, other in zip(target, source, strict=True):
            _for_each(one, other, act)
