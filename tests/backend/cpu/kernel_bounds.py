"""Error bounds of reductions, and the float64 comparison that uses them."""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance between 1 and the next number, rounded up to the spacing for 16-bit types."""


def reduction_bound(
    ref: Tensor, magnitude: Tensor, terms: int, out_dtype: torch.dtype, acc_unit: float = 2.0**-24
) -> Tensor:
    """u_out * |ref| + 4 * sqrt(K) * u_acc * sum|a||b|, elementwise.

    Args:
        ref: The exact result, float64.
        magnitude: The sum of the terms' magnitudes, shaped as ref.
        terms: K.
    """
    bound: Tensor = UNIT[out_dtype] * ref.abs() + 4 * terms**0.5 * acc_unit * magnitude + 1e-30
    return bound


def worst(got: Tensor, ref: Tensor, bound: Tensor) -> float:
    """The largest error in units of its bound; infinite where `got` is not finite."""
    error = (got.double() - ref).abs() / bound
    return float(torch.where(torch.isnan(error), torch.inf, error).max()) if error.numel() else 0.0
