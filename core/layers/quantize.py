"""Quantizing dense weights at load, with one scale a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from core.backend.schemes import quantize_fp8_channel, quantize_int8
from core.backend.weights import WeightSource

__all__ = ["QUANTIZERS", "QuantizingSource"]

QUANTIZERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "int8": quantize_int8,
    "fp8_channel": quantize_fp8_channel,
}
"""Schemes that a dense weight can be brought to at load: [N, K] to its parts (weight, scale)."""


class QuantizingSource(WeightSource):
    """A weight that is quantized when it is read; one that is quantized already is dequantized first.

    Args:
        source: Where the weight comes from.
        scheme: A key of `QUANTIZERS`.
    """

    def __init__(self, source: WeightSource, scheme: str) -> None:
        self.name, self.shape, self.scheme = source.name, source.shape, scheme
        self._source = source

    def parts(self) -> Mapping[str, Tensor]:
        """Weight and scale, new host tensors."""
        weight, scale = QUANTIZERS[self.scheme](self._source.dense(torch.float32))
        return {"weight": weight, "scale": scale}
