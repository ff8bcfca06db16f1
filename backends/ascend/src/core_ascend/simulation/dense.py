"""Numerics of norms, gates, rotations and formats."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from core_ascend.limits import MAX_ROTARY_HEADS
from core_ascend.simulation import chip_types
from core_ascend.simulation.calls import numerics
from core_ascend.simulation.faults import need, need_contiguous, need_types

__all__: list[str] = []

_FORMATS = (2, 29)


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * weight).to(x.dtype), scale


@numerics("npu::npu_rms_norm")
def _rms_norm(input, gamma, epsilon=1e-6):  # type: ignore[no-untyped-def]
    need_types("npu_rms_norm", chip_types.floats, input=input, gamma=gamma)
    need_contiguous("npu_rms_norm", input=input, gamma=gamma)
    need(gamma.shape == input.shape[-1:], "npu_rms_norm: gamma has the width of a row")
    return _normed(input, gamma.float(), epsilon)


@numerics("npu::npu_gemma_rms_norm")
def _gemma_rms_norm(input, gamma, epsilon=1e-6):  # type: ignore[no-untyped-def]
    need_types("npu_gemma_rms_norm", chip_types.floats, input=input, gamma=gamma)
    need_contiguous("npu_gemma_rms_norm", input=input, gamma=gamma)
    need(gamma.shape == input.shape[-1:], "npu_gemma_rms_norm: gamma has the width of a row")
    return _normed(input, gamma.float() + 1.0, epsilon)


@numerics("npu::npu_add_rms_norm")
def _add_rms_norm(x1, x2, gamma, epsilon=1e-6):  # type: ignore[no-untyped-def]
    need_types("npu_add_rms_norm", chip_types.floats, x1=x1, x2=x2, gamma=gamma)
    need_contiguous("npu_add_rms_norm", x1=x1, x2=x2, gamma=gamma)
    need(x1.shape == x2.shape, "npu_add_rms_norm: x1 and x2 differ in shape")
    total = x1 + x2
    y, scale = _normed(total, gamma.float(), epsilon)
    return y, scale, total


@numerics("npu::npu_add_rms_norm_dynamic_quant")
def _add_rms_norm_dynamic_quant(x1, x2, gamma, *, epsilon=1e-6, output_mask=None):  # type: ignore[no-untyped-def]
    call = "npu_add_rms_norm_dynamic_quant"
    need_types(call, chip_types.halves, x1=x1, x2=x2, gamma=gamma)
    need_contiguous(call, x1=x1, x2=x2, gamma=gamma)
    need(output_mask == [True, False], f"{call}: without smooth scales there is one quantized result")
    total = x1 + x2
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    q, scale = row_quantized(y)
    return q, torch.empty(0, dtype=torch.int8), total, scale, torch.empty(0)


def row_quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 rows, scale of each row, float32): the largest magnitude of a row becomes 127."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127.0
    q = (wide / torch.where(scale == 0, 1.0, scale)[..., None]).round().clamp(-128, 127).to(torch.int8)
    return q, scale


@numerics("npu::npu_swiglu")
def _swiglu(input, dim=-1):  # type: ignore[no-untyped-def]
    need_types("npu_swiglu", chip_types.floats, input=input)
    gate, up = input.float().chunk(2, dim)
    return (F.silu(gate) * up).to(input.dtype)


@numerics("npu::npu_geglu")
def _geglu(input, dim=-1, approximate=1, activate_left=False):  # type: ignore[no-untyped-def]
    need_types("npu_geglu", chip_types.floats, input=input)
    left, right = input.float().chunk(2, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = F.gelu(gate, approximate="tanh" if approximate else "none")
    return (gelu * up).to(input.dtype), gelu.to(input.dtype)


@numerics("npu::npu_rotary_mul")
def _rotary_mul(input, r1, r2, rotary_mode="half"):  # type: ignore[no-untyped-def]
    call = "npu_rotary_mul"
    need_types(call, chip_types.floats, input=input, r1=r1, r2=r2)
    need_contiguous(call, input=input, r1=r1, r2=r2)
    need(input.dim() == 4 and r1.shape == r2.shape and r1.dim() == 4, f"{call}: four dims")
    batch, tokens, heads, width = input.shape
    need(batch < 1000 and heads <= MAX_ROTARY_HEADS and width < 896 and width % 2 == 0, f"{call}: {tuple(input.shape)}")
    need(r1.shape == (1, tokens, 1, width), f"{call}: angles {tuple(r1.shape)} do not fit {tuple(input.shape)}")
    if rotary_mode == "half":
        a, b = input.chunk(2, -1)
        other = torch.cat((-b, a), -1)
    else:
        need(rotary_mode == "interleave", f"{call}: mode {rotary_mode!r}")
        other = torch.stack((-input[..., 1::2], input[..., ::2]), -1).flatten(-2)
    return (input.float() * r1.float() + other.float() * r2.float()).to(input.dtype)


@numerics("npu::npu_format_cast")
def _format_cast(input, acl_format):  # type: ignore[no-untyped-def]
    need(acl_format in _FORMATS, f"npu_format_cast: format {acl_format} is not simulated")
    need_contiguous("npu_format_cast", input=input)
    if acl_format == 2:
        return input.clone()
    need(input.dtype in (*chip_types.halves, torch.int8, torch.int32), f"npu_format_cast: no fractals of {input.dtype}")
    return chip_types.mark_fractal(input.clone())


@numerics("npu::get_npu_format")
def _get_format(input):  # type: ignore[no-untyped-def]
    return 29 if chip_types.is_fractal(input) else 2
