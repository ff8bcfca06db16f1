"""What every kernel asks of its tensors, and the addresses that it passes on."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DTYPE_CODES", "dtype_code", "float32_address", "head_parts", "int32_address", "require"]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types of activations and dense weights, as the extension numbers them."""


def require(ok: bool, what: str) -> None:
    """Raises ValueError with `what` unless ok."""
    if not ok:
        raise ValueError(what)


def dtype_code(x: Tensor, name: str) -> int:
    """The extension's number of an element type; ValueError where it has none."""
    code = DTYPE_CODES.get(x.dtype)
    if code is None:
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
    return code


def int32_address(x: Tensor, name: str, dims: int = 1) -> int:
    """Where int32 numbers lie, contiguous in the last dim; ValueError where they do not."""
    ok = x.dtype == torch.int32 and x.dim() == dims and (x.numel() == 0 or x.stride(-1) == 1)
    require(ok, f"{name} must be int32, {dims}-dimensional and contiguous, got {x.dtype} {tuple(x.shape)}")
    return x.data_ptr()


def float32_address(x: Tensor, name: str, shape: tuple[int, ...]) -> int:
    """Where a contiguous float32 tensor of this shape lies; ValueError where it is none."""
    ok = x.dtype == torch.float32 and tuple(x.shape) == shape and x.is_contiguous()
    require(ok, f"{name} must be float32 {shape}, contiguous, got {x.dtype} {tuple(x.shape)}")
    return x.data_ptr()


def head_parts(x: Tensor, name: str, heads: int, dim: int) -> tuple[int, int, int]:
    """(address, token stride, head stride) of [t, heads, dim]."""
    ok = x.dim() == 3 and tuple(x.shape[1:]) == (heads, dim) and x.stride(2) == 1
    require(ok, f"{name} must be [t, {heads}, {dim}], contiguous in the last dim, got {tuple(x.shape)}")
    return x.data_ptr(), x.stride(0), x.stride(1)
