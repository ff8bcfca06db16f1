"""In which type the reference computes, and how it rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend.layout import torch_dtype
from core.backend.ops.spec import OpSpec
from core.spec import DType

__all__ = ["saturate", "wide"]

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e8m0fnu)


def wide(op: OpSpec) -> torch.dtype:
    """The type of intermediate results: float64 where `op` is in float64 (the oracle), else float32."""
    return torch.float64 if op.dtype is DType.FLOAT64 else torch.float32


def saturate(x: Tensor, dtype: DType) -> Tensor:
    """`x` rounded to `dtype`; what an 8-bit type cannot hold becomes its largest value of the same sign."""
    target = torch_dtype(dtype)
    if target is torch.int8:
        return x.round().clamp(-128, 127).to(target)
    if target in _FLOAT8:
        limit = torch.finfo(target).max
        return x.clamp(-limit, limit).to(target)
    return x.to(target)
