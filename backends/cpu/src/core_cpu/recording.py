"""Recorded steps: kernel calls kept on a tape, and run again in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from core.backend import Graph, Plan, UnsupportedError
from core_cpu import _kernels
from core_cpu.plan import CpuPlan
from core_cpu.tape_memory import TapeMemory, allocating_from

__all__ = ["CpuGraph", "record"]


class _OnlyKernels(TorchDispatchMode):
    """Refuses torch calls that compute: a tape keeps kernel calls alone. Views are free."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_view(func):
            return func(*args, **(kwargs or {}))
        with self:
            # In inference mode torch hands over compound calls whole (chunk, flatten, ...): look at their parts.
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        raise UnsupportedError(
            "capture", f"the step calls torch's {func} between kernels, which a tape cannot keep", "run it eagerly"
        )


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


class CpuGraph(Graph):
    """A step as a tape. Rows past `num_valid_tokens` of the plans' batch are neither computed nor written.

    Args:
        tape: The calls.
        plans: What the calls read at each replay.
        result: What the step returned; its memory is the recording's.
    """

    __slots__ = ("_plans", "_result", "_tape")

    def __init__(self, tape: Any, plans: Sequence[Plan], result: Any, fn: Callable[[], Any]) -> None:
        super().__init__(fn)  # which holds the inputs, by what it encloses
        self._tape, self._plans, self._result = tape, tuple(plans), result

    @property
    def num_calls(self) -> int:
        """Kernel calls of the step."""
        return len(self._tape)

    def replay(self, plans: Sequence[Plan]) -> Any:
        """Runs the calls without a line of Python in between."""
        assert len(plans) == len(self._plans) and all(map(_same, plans, self._plans)), "not the plans of the recording"
        self._tape.replay()
        return self._result

    def profile(self) -> list[tuple[str, float]]:
        """Runs the calls as a replay does; (operation, seconds) of each."""
        found: list[tuple[str, float]] = self._tape.profile()
        return found


def _same(a: object, b: object) -> bool:
    return a is b


def record(fn: Callable[[], Any], plans: Sequence[Plan], memory: TapeMemory) -> CpuGraph:
    """Keeps the kernel calls of `fn`; none of them runs.

    Raises:
        UnsupportedError: `fn` computes something by torch.
    """
    first = next((plan for plan in plans if isinstance(plan, CpuPlan)), None)
    tape = _kernels.Tape()
    tape.record(None if first is None else first.handle)
    try:
        with allocating_from(memory), _OnlyKernels():  # type: ignore[no-untyped-call]
            result = fn()
    finally:
        tape.stop()
    _clear(result)
    return CpuGraph(tape, plans, result, fn)


def _clear(result: Any) -> None:
    """Zeros: rows of padding are never written, and what is read of them must be finite."""
    if isinstance(result, Tensor):
        result.zero_()
    elif isinstance(result, list | tuple):
        for part in result:
            _clear(part)
