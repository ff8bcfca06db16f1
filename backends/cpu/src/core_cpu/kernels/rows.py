"""Operations on rows: norms, gated activations, rotary embedding."""

from __future__ import annotations

from torch import Tensor

from core_cpu import _kernels
from core_cpu.kernels.arguments import dtype_code, float32_address, head_parts, int32_address, require
from core_cpu.tape_memory import empty

__all__ = ["ACTIVATIONS", "act_mul", "rms_norm", "rope"]

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    offset: float = 0.0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim, in float32.

    Args:
        x: [t, dim] or [t, heads, dim], any strides but contiguous in the last dim.
        weight: [dim], any float type.
        residual: [t, dim], dtype of x: becomes x + residual, rounded, and that sum is normed.
        out: Where to write, shaped as x; may be x.
    """
    require(x.dim() in (2, 3) and x.stride(-1) == 1, f"x must be [t, dim] or [t, heads, dim], got {tuple(x.shape)}")
    dim, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    require(tuple(weight.shape) == (dim,) and weight.is_contiguous(), f"weight must be [{dim}], contiguous")
    if out is None:
        out = empty(x.shape, x.dtype)
    require(out.shape == x.shape and out.dtype == x.dtype and out.stride(-1) == 1, "out must be shaped as x")
    residual_at, residual_stride = 0, 0
    if residual is not None:
        ok = x.dim() == 2 and residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
        require(ok, f"residual must be {tuple(x.shape)} {x.dtype}")
        residual_at, residual_stride = residual.data_ptr(), residual.stride(0)
    _kernels.rms_norm(
        x.data_ptr(),
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        out.data_ptr(),
        out.stride(0),
        out.stride(1) if x.dim() == 3 else 0,
        weight.data_ptr(),
        dtype_code(x, "x"),
        dtype_code(weight, "weight"),
        x.shape[0],
        heads,
        dim,
        eps,
        offset,
        residual_at,
        residual_stride,
        residual_at,
        residual_stride,
    )
    return out


def act_mul(x: Tensor, activation: str = "silu") -> Tensor:
    """activation(x[:, :size]) * x[:, size:] in float32: [t, size] from [t, 2 * size]."""
    ok = x.dim() == 2 and x.shape[1] % 2 == 0 and x.stride(1) == 1
    require(ok, f"x must be [t, 2 * size], contiguous in the last dim, got {tuple(x.shape)}")
    size = x.shape[1] // 2
    out = empty((x.shape[0], size), x.dtype)
    code = ACTIVATIONS[activation]
    _kernels.act_mul(x.data_ptr(), x.stride(0), size, out.data_ptr(), size, dtype_code(x, "x"), code, x.shape[0], size)
    return out


def rope(x: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotates the first rotary_dim elements of each head, in place, in float32.

    Args:
        x: [t, heads, head_dim], any strides in the first two dims; overwritten.
        positions: [t], int32.
        cos_sin: [max_position, rotary_dim], float32: cosines, then sines.
    """
    rotary_dim = cos_sin.shape[1]
    require(rotary_dim % 2 == 0 and rotary_dim <= x.shape[2], f"rotary_dim {rotary_dim} does not fit {x.shape[2]}")
    address, stride, head_stride = head_parts(x, "x", x.shape[1], x.shape[2])
    table = float32_address(cos_sin, "cos_sin", (cos_sin.shape[0], rotary_dim))
    at = int32_address(positions, "positions")
    require(positions.shape[0] == x.shape[0], f"{positions.shape[0]} positions for {x.shape[0]} tokens")
    _kernels.rope(
        address, stride, head_stride, dtype_code(x, "x"), x.shape[0], x.shape[1], rotary_dim, interleaved, at, table
    )
