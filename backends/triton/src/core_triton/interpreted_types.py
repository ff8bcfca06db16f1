"""The types that Triton's front end makes for every value, made once: they take most of the interpreter's time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["share_types"]


def share_types(runtime: Any, core: ModuleType) -> None:
    """Equal block types become one object, with the shape that its tensors show; numpy's types are looked up."""
    _share_block_types(core.block_type)
    _share_shapes(core)
    _look_up_numpy_types(runtime, core)


def _share_block_types(block_type: Any) -> None:
    known: dict[Any, Any] = {}
    make = block_type.__init__

    def shared(cls: Any, element: Any, shape: Any) -> Any:
        key = (element.name, getattr(element, "const", False), tuple(getattr(size, "value", size) for size in shape))
        found = known.get(key)
        if found is None:
            found = object.__new__(cls)
            make(found, element, shape)
            known[key] = found
        return found

    block_type.__new__ = staticmethod(shared)
    block_type.__init__ = lambda self, element, shape: None


def _share_shapes(core: ModuleType) -> None:
    scalar: list[Any] = []
    plain = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        known = scalar if not type.is_block() else type.__dict__.setdefault("tensor_shape", [])
        if not known:
            plain(self, handle, type)
            known[:] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    core.tensor.__init__ = init


def _look_up_numpy_types(runtime: Any, core: ModuleType) -> None:
    plain, pointer = runtime._get_np_dtype, np.dtype(np.uint64)
    known: dict[str, Any] = {}

    def numpy_type(kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, core.pointer_type):
            return pointer
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = plain(scalar)
        return found

    runtime._get_np_dtype = numpy_type
