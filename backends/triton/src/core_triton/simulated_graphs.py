"""Recorded steps of a simulated device: what a driver's graph keeps, and what it cannot.

A recording keeps each launch with the arguments and the grid that it had, and each torch call; a replay does them again
and runs no Python of the step. So a number that the host read of this step is as stale in the next one as on a chip.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from core.backend import Graph, Plan

__all__ = ["NotRecordableError", "SimulatedGraph", "record"]

_SYNCHRONIZING = frozenset(
    {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
)
"""Calls whose result is known only when the device has computed what came before."""
_HOST_READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.cpu, Tensor.__bool__, Tensor.__int__})
"""The same for tensors of the host, on which torch does them without a call to the dispatcher."""


class NotRecordableError(RuntimeError):
    """The step does what no graph can hold."""


class _Launches(threading.local):
    recorder: _Recorder | None = None


_current = _Launches()


class _Recorder(TorchDispatchMode):
    """Keeps the calls of a step; those inside of a launch are the kernel's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], Any]] = []
        self._launching = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._launching:
            return func(*args, **kwargs)
        with self:
            # In inference mode torch hands over compound calls whole (chunk, flatten, ...): look at their parts.
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name
        if name in _SYNCHRONIZING or (name.startswith("aten::index") and _has_mask(args)):
            raise NotRecordableError(f"the host waits for the device while a step is recorded ({name})")
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.calls.append(functools.partial(func, *args, **kwargs))
        elif not _is_view(func) and "empty" not in name:
            self.calls.append(functools.partial(_again, result, func, args, kwargs))
        return result


class _NoHostReads(TorchFunctionMode):
    """Refuses to look at a tensor while a step is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = _current.recorder
        if func in _HOST_READS and recorder is not None and not recorder._launching:
            raise NotRecordableError(f"the host reads the device while a step is recorded ({func.__name__})")
        return func(*args, **(kwargs or {}))


class SimulatedGraph(Graph):
    """A recorded step of a simulated device.

    Args:
        calls: Of the recording, in order.
        plans: Those of the recording.
        result: What the recorded function returned; overwritten by each replay.
    """

    __slots__ = ("_calls", "_plans", "_result")

    def __init__(
        self, fn: Callable[[], Any], calls: Sequence[Callable[[], Any]], plans: Sequence[Plan], result: Any
    ) -> None:
        super().__init__(fn)
        self._calls, self._plans, self._result = tuple(calls), tuple(plans), result

    def replay(self, plans: Sequence[Plan]) -> Any:
        assert len(plans) == len(self._plans) and all(a is b for a, b in zip(plans, self._plans, strict=True)), (
            "a graph is replayed with the plans that it was recorded with"
        )
        for call in self._calls:
            call()
        return self._result


def record(fn: Callable[[], Any], plans: Sequence[Plan]) -> SimulatedGraph:
    """Records one call of `fn`.

    Raises:
        NotRecordableError: it waits for the device, or reads it on the host.
    """
    _watch_launches()
    recorder = _Recorder()
    _current.recorder = recorder
    try:
        with _NoHostReads(), recorder:
            result = fn()
    finally:
        _current.recorder = None
    return SimulatedGraph(fn, recorder.calls, plans, result)


@functools.cache
def _watch_launches() -> None:
    """From here on every launch of the interpreter asks whether a step is being recorded."""
    interpreted = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    plain = interpreted.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        recorder = _current.recorder
        if recorder is None:
            plain(self, *args, **kwargs)
            return
        with recorder.launching():
            plain(self, *args, **kwargs)
        recorder.calls.append(functools.partial(plain, self, *args, **kwargs))

    interpreted.run = run


def _again(result: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Calls anew and brings what comes to where the recording had it."""
    _overwrite(result, func(*args, **kwargs))


def _overwrite(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        if source is not target:
            target.copy_(source)
    elif isinstance(target, list | tuple):
        for mine, new in zip(target, source, strict=True):
            _overwrite(mine, new)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _has_mask(args: Any) -> bool:
    """Whether an index is a mask, of which the device must be asked how much it lets through."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)
