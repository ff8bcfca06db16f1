"""The simulated chip's graphs: a recording keeps launches and torch calls with their very tensors; it is strict."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.backend import Graph, Plan
from core_sim.kernels import require

__all__ = ["SimGraph", "launch", "record"]

_HOST_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero"})


class _Recorder(TorchDispatchMode):
    """Sees every torch call of the step; those inside of a launch are the chip's own and are not kept."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []
        self._launching = False

    @contextmanager
    def launching(self) -> Iterator[None]:
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def keep(self, run: Callable[[], Any], result: Any) -> None:
        """At each replay `run` is called and what it gives is written over `result`."""
        self.calls.append(lambda: _overwrite(result, run()))

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
        require(name not in _HOST_READS, f"the host reads the device while a graph is recorded ({name})")
        result = func(*args, **kwargs)
        if not _is_view(func):
            self.keep(lambda: func(*args, **kwargs), None if func._schema.is_mutable else result)
        return result


class _Current(threading.local):
    recorder: _Recorder | None = None


_current = _Current()


class SimGraph(Graph):
    """A recorded step. Plans, and the tensors that they name, must be those of the recording."""

    __slots__ = ("_addresses", "_calls", "_plans", "_result")

    def __init__(
        self, fn: Callable[[], Any], calls: Sequence[Callable[[], None]], plans: Sequence[Plan], result: Any
    ) -> None:
        super().__init__(fn)
        self._calls, self._plans, self._result = tuple(calls), tuple(plans), result
        self._addresses = [_addresses(plan) for plan in plans]

    def replay(self, plans: Sequence[Plan]) -> Any:
        same = len(plans) == len(self._plans) and all(a is b for a, b in zip(plans, self._plans, strict=True))
        require(same, "a graph is replayed with the plans that it was recorded with")
        for plan, known in zip(plans, self._addresses, strict=True):
            require(_addresses(plan) == known, "an input of the graph has moved since it was recorded")
        for call in self._calls:
            call()
        return self._result


def launch(kernel: Callable[[Any], Any], args: Any) -> Any:
    """Runs a kernel; while a graph is recorded it is kept, and what it gives is garbage until a replay."""
    recorder = _current.recorder
    if recorder is None:
        return kernel(args)
    with recorder.launching():
        result = kernel(args)
        _overwrite(result, None)
    recorder.keep(lambda: kernel(args), result)
    return result


def record(fn: Callable[[], Any], plans: Sequence[Plan]) -> SimGraph:
    """Records one call of `fn`.

    Raises:
        SimFault: the step reads the device on the host.
    """
    recorder = _Recorder()
    _current.recorder = recorder
    try:
        with recorder:
            result = fn()
    finally:
        _current.recorder = None
    return SimGraph(fn, recorder.calls, plans, result)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _overwrite(target: Any, source: Any) -> None:
    """Copies a result over that of the recording; None spoils it: NaN, or 0 where there is no NaN."""
    if isinstance(target, Tensor):
        if source is None:
            target.fill_(float("nan") if target.is_floating_point() else 0)
        elif source is not target:
            target.copy_(source)
    elif isinstance(target, list | tuple):
        for index, part in enumerate(target):
            _overwrite(part, None if source is None else source[index])


def _addresses(plan: Plan) -> list[int]:
    batch, group = plan.batch, plan.group
    tensors: list[torch.Tensor] = [
        batch.token_ids, batch.positions, batch.query_start_loc, batch.num_valid_tokens,
        group.block_table, group.slots, group.seq_lens,
    ]  # fmt: skip
    return [tensor.data_ptr() for tensor in tensors]
