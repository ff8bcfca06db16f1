"""In which type the reference computes, and how it rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend.layout import torch_dtype
from core.backend.ops.spec import Determinism, OpSpec
from core.spec import DType

__all__ = ["alone", "row_by_row", "saturate", "wide"]

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e8m0fnu)


def wide(op: OpSpec) -> torch.dtype:
    """The type of intermediate results: float64 where `op` is in float64 (the oracle), else float32."""
    return torch.float64 if op.dtype is DType.FLOAT64 else torch.float32


def alone(op: OpSpec) -> bool:
    """Whether each row is computed alone, so that its bits do not depend on the others (class D2 and above).

    Libraries choose kernels by shape, and the vector or the scalar form of a function by an element's place.
    """
    return op.determinism >= Determinism.D2


def row_by_row(op: OpSpec, fn: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """fn(*tensors), over one row at a time where rows must not show in each other.

    Args:
        fn: Maps tensors with equal dim 0 to a tensor with the same dim 0, row by row.
    """
    if not alone(op) or not len(tensors[0]):
        return fn(*tensors)
    return torch.cat([fn(*(row.clone() for row in rows)) for rows in zip(*(x.split(1) for x in tensors), strict=True)])


def saturate(x: Tensor, dtype: DType) -> Tensor:
    """`x` rounded to `dtype`; what an 8-bit type cannot hold becomes its largest value of the same sign."""
    target = torch_dtype(dtype)
    if target is torch.int8:
        return x.round().clamp(-128, 127).to(target)
    if target in _FLOAT8:
        limit = torch.finfo(target).max
        return x.clamp(-limit, limit).to(target)
    return x.to(target)
