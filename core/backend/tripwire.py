"""A tripwire for tests: a model's forward may call contract operations and tensor views, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from core.backend.ops.spec import OpSpec

__all__ = ["ALLOWED_VIEWS", "Tripwire", "TripwireError"]

ALLOWED_VIEWS = frozenset(
    {
        "aten::alias",
        "aten::as_strided",
        "aten::detach",
        "aten::expand",
        "aten::narrow",
        "aten::permute",
        "aten::select.int",
        "aten::slice.Tensor",
        "aten::split.Tensor",
        "aten::split_with_sizes",
        "aten::squeeze.dim",
        "aten::t",
        "aten::transpose.int",
        "aten::unbind.int",
        "aten::unsqueeze",
        "aten::view",
        "aten::_unsafe_view",
    }
)
"""Tensor views that a model may take between operations: they read and write no element."""


class TripwireError(AssertionError):
    """A model called torch itself. Names the call."""


class Tripwire(TorchDispatchMode):
    """While active, every torch call outside a bound operation raises, views excepted.

    Use it around a model's forward whose operations a `Binder(tripwire=...)` bound::

        wire = Tripwire()
        binder = Binder(backend, info, device, block_size=16, tripwire=wire)
        ...
        with wire:
            model.forward(batch, plans)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._depth = 0
        self.operations: list[str] = []
        """Names of the operations that were called, in order."""

    @contextmanager
    def inside(self, op: OpSpec) -> Iterator[None]:
        """Marks that an operation runs: what it calls is its own affair."""
        self.operations.append(op.name)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name if func._overloadname == "default" else f"{func._schema.name}.{func._overloadname}"
        if self._depth == 0 and name not in ALLOWED_VIEWS:
            with self:
                # In inference mode torch hands over compound calls whole (chunk, flatten, ...): look at their parts.
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
            raise TripwireError(f"the model calls {name} itself; use a contract operation or a listed view")
        return func(*args, **(kwargs or {}))
