"""A device of its own for torch, written in Python: its tensors live apart from the host's, and mixing the two raises.

It stands for the torch device of any chip. Importing it makes torch know the word "far". Its arithmetic is the host's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["Far"]

_setup_privateuseone_for_python_backend("far")  # type: ignore[no-untyped-call]


class Far(torch.Tensor):
    """A tensor on the device.

    Args:
        raw: What is in it, which nobody but the device's own operations may see.
    """

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Far:
        facts = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype, "device": "far"}
        made: Far = torch.Tensor._make_wrapper_subclass(cls, raw.size(), **facts)  # type: ignore[attr-defined]
        made.raw = raw
        return made

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parts = func.decompose(*args, **(kwargs or {}))  # in inference mode operations come whole
        return _run(func, args, kwargs or {}) if parts is NotImplemented else parts


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    aten = torch.ops.aten
    if func is aten.copy_.default:
        _raw(args[0]).copy_(_raw(args[1]))
        return args[0]
    if func is aten._to_copy.default:
        target = torch.device(kwargs.get("device") or args[0].device)
        kept = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        moved = func(_raw(args[0]), **kept)
        return Far(moved) if target.type == "far" else moved
    result = func(*tree_map(_inside(func), args), **tree_map(_inside(func), kwargs))
    known = {id(leaf.raw): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Far)}
    return tree_map(lambda x: known[id(x)] if id(x) in known else _outside(x), result)


def _raw(x: torch.Tensor) -> torch.Tensor:
    return x.raw if isinstance(x, Far) else x


def _outside(x: Any) -> Any:
    return Far(x) if isinstance(x, torch.Tensor) else x


def _inside(func: Any) -> Any:
    """What the device's operation gets for each argument; numbers may come from the host, tensors may not."""

    def convert(x: Any) -> Any:
        if isinstance(x, Far):
            return x.raw
        if isinstance(x, torch.Tensor) and x.dim():
            raise RuntimeError(f"{func}: a tensor of the host, {tuple(x.shape)}, meets one of the device")
        return torch.device("cpu") if isinstance(x, torch.device) else x

    return convert


_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")

_host_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **facts: Any) -> torch.Tensor:
    """torch.tensor, which cannot make tensors of a device that is written in Python."""
    host = _host_tensor(data, **facts)
    return host if device is None else host.to(device)


_DONE = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
torch.tensor = _tensor
torch.accelerator.current_stream = lambda device=None: SimpleNamespace(record_event=lambda: _DONE)  # type: ignore
# transformers, which makes the goldens, would load weights by way of the accelerator.
torch.accelerator.is_available = lambda: False
torch.accelerator.current_accelerator = lambda check_available=False: None
