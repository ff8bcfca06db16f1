"""What the simulated chip is, for the numerics: the types of its units, and which tensors lie in fractals."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from core.backend import torch_dtype
from core_ascend.chips import CHIPS, Chip

__all__ = ["floats", "halves", "is_fractal", "mark_fractal", "set_chip"]

halves: frozenset[torch.dtype] = frozenset()
"""16-bit types of its matrix unit."""
floats: frozenset[torch.dtype] = frozenset()
"""Those, and float32."""

_fractals: dict[int, weakref.ref[Tensor]] = {}


def set_chip(chip: Chip) -> None:
    """Simulates that chip from now on."""
    global halves, floats
    halves = frozenset(map(torch_dtype, chip.halves))
    floats = halves | {torch.float32}


def mark_fractal(tensor: Tensor) -> Tensor:
    """Remembers that a tensor is in fractals; its elements stay where they are."""
    key = id(tensor)
    _fractals[key] = weakref.ref(tensor, lambda _: _fractals.pop(key, None))
    return tensor


def is_fractal(tensor: Tensor) -> bool:
    """Whether the tensor is in fractals."""
    found = _fractals.get(id(tensor))
    return found is not None and found() is tensor


set_chip(CHIPS[0])
