"""Products with packed weights, and rows gathered from them."""

from __future__ import annotations

import torch
from torch import Tensor

from core_cpu import _kernels
from core_cpu.kernels.arguments import dtype_code, int32_address, require
from core_cpu.kernels.weights import PackedWeight
from core_cpu.tape_memory import empty

__all__ = ["dequantize", "embed", "linear"]


def linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    invariant: bool = False,
    int8_activations: bool = False,
) -> Tensor:
    """x @ weight.T + bias, accumulated in float32 (int32 for int8 weights, whose rows of x are quantized here).

    Args:
        x: [m, k], float32, bfloat16 or float16, contiguous in the last dim, read-only.
        bias: [n], float32, bfloat16 or float16.
        out_dtype: Type of the result; that of x where None.
        out: [m, n] to write into, contiguous in the last dim.
        invariant: Whether a row's bits may not depend on m.
        int8_activations: Round x to int8, 32 values of a row to a scale; weights other than GGUF blocks ignore it.

    Returns:
        [m, n].
    """
    n, k = weight.shape
    require(x.dim() == 2 and x.shape[1] == k and x.stride(1) == 1, f"x must be [m, {k}] rows, got {tuple(x.shape)}")
    if out is None:
        out = empty((x.shape[0], n), out_dtype or x.dtype)
    require(tuple(out.shape) == (x.shape[0], n) and out.stride(1) == 1, f"out must be {(x.shape[0], n)} rows")
    bias_address, bias_dtype = 0, 0
    if bias is not None:
        require(tuple(bias.shape) == (n,) and bias.is_contiguous(), f"bias must be [{n}], got {tuple(bias.shape)}")
        bias_address, bias_dtype = bias.data_ptr(), dtype_code(bias, "bias")
    _kernels.linear(
        weight.handle,
        x.data_ptr(),
        dtype_code(x, "x"),
        x.shape[0],
        x.stride(0),
        out.data_ptr(),
        dtype_code(out, "out"),
        out.stride(0),
        bias_address,
        bias_dtype,
        invariant,
        int8_activations,
    )
    return out


def embed(
    token_ids: Tensor, weight: PackedWeight, *, out_dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> Tensor:
    """Rows of a packed weight, dequantized and times `scale`: [t, k].

    Args:
        token_ids: [t], int32, each in [0, n): the caller has checked them.
    """
    ids = int32_address(token_ids, "token_ids")
    out = empty((token_ids.shape[0], weight.shape[1]), out_dtype)
    _kernels.embed(
        weight.handle, ids, token_ids.shape[0], out.data_ptr(), dtype_code(out, "out"), weight.shape[1], scale
    )
    return out


def dequantize(weight: PackedWeight) -> Tensor:
    """The whole weight: [n, k], float32."""
    out = torch.empty(weight.shape, dtype=torch.float32)
    _kernels.dequantize(weight.handle, out.data_ptr())
    return out
