"""Weights in panels: the kernels' own form of everything that `pack` brings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.backend import Packed, WeightSource
from core_cpu import kernels

__all__ = ["KERNEL_SCHEMES", "CpuPacked", "pack"]

KERNEL_SCHEMES = {
    "int8": kernels.Scheme.INT8,
    "fp8_tensor": kernels.Scheme.FP8,
    "fp8_channel": kernels.Scheme.FP8,
    "fp8_block": kernels.Scheme.FP8,
    "q8_0": kernels.Scheme.Q8_0,
    "q4_0": kernels.Scheme.Q4_0,
    "q4_1": kernels.Scheme.Q4_1,
    "q5_0": kernels.Scheme.Q5_0,
    "q5_1": kernels.Scheme.Q5_1,
    "q4_k": kernels.Scheme.Q4_K,
    "q5_k": kernels.Scheme.Q5_K,
    "q6_k": kernels.Scheme.Q6_K,
}
"""Schemes that stay quantized in memory."""


class CpuPacked(Packed):
    """A weight in panels of 16 rows.

    Args:
        weight: What the kernels take.
        scheme: Its name in the contract.
    """

    __slots__ = ("weight",)

    def __init__(self, weight: kernels.PackedWeight, scheme: str) -> None:
        super().__init__(shape=weight.shape, scheme=scheme, tensors=weight.tensors)
        self.weight = weight

    def dense(self) -> Tensor:
        """The weight in float32."""
        return kernels.dequantize(self.weight)


def pack(source: WeightSource, scheme: str, dtype: torch.dtype) -> CpuPacked:
    """Panels of one matrix, kept in its own scheme or dense in `dtype`."""
    if scheme == "none":
        return CpuPacked(kernels.pack(_rows(source.dense(dtype))), scheme)
    parts: Mapping[str, Tensor] = source.parts()
    return CpuPacked(kernels.pack(_rows(parts["weight"]), KERNEL_SCHEMES[scheme], parts.get("scale")), scheme)


def _rows(weight: Tensor) -> Tensor:
    return weight if weight.stride(-1) == 1 else weight.contiguous()
