"""Weights as the kernels of a target want them: the scheme's own parts, in the 8-bit float that the chip multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import Packed
from core.spec import DType
from core_triton.ops.products import input_format
from core_triton.target import Target

__all__ = ["fnuz_parts", "suited"]

_MINUS_ZERO, _NAN, _FNUZ_NAN = 0x80, 0x7F, 0x80


def suited(packed: Packed, target: Target) -> Packed:
    """The weight for that target, with the activation format in which its kernel is fastest. May be `packed`."""
    parts = dict(packed.tensors())
    if target.fp8_dtype is DType.FLOAT8_E4M3FNUZ and parts["weight"].dtype == torch.float8_e4m3fn:
        parts["weight"], parts["scale"] = fnuz_parts(parts["weight"], parts["scale"])
    form = input_format(packed.scheme, target)
    if form is None and parts["weight"] is packed.tensors()["weight"]:
        return packed
    return Packed(shape=packed.shape, scheme=packed.scheme, tensors=parts, input_format=form)


def fnuz_parts(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same values with e4m3fnuz bytes, where each byte counts half of what it does in e4m3fn: scales are doubled.

    Args:
        weight: float8_e4m3fn.
        scale: Numbers, or UE8M0 exponents (float8_e8m0fnu, uint8).

    Returns:
        (float8_e4m3fnuz, scales of the given type). Minus zero, which would be NaN, becomes zero; NaN stays NaN.
    """
    bits = weight.view(torch.uint8)
    nan = (bits & 0x7F) == _NAN
    turned = torch.where(bits == _MINUS_ZERO, 0, bits).to(torch.uint8)
    turned = torch.where(nan, _FNUZ_NAN, turned).to(torch.uint8)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        doubled = scale.view(torch.uint8).clamp(max=253) + 1
        return turned.view(torch.float8_e4m3fnuz), doubled.view(scale.dtype)
    return turned.view(torch.float8_e4m3fnuz), scale * 2
