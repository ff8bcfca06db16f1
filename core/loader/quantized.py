"""A weight as a file stores it in a quantized scheme of the contract."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from core.backend.schemes import GGUF_BLOCKS, SCHEMES, take
from core.errors import ModelLoadError

__all__ = ["QuantizedTensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A weight [out, in] as it is stored; read-only, its tensors may be views of the mapped file.

    Args:
        data: [out, bytes_per_row], uint8, for GGUF schemes; [out, in], int8 or float8, for those with a scale.
        scheme: Name in `core.backend.SCHEMES`.
        shape: (out, in), in elements.
        scale: float32: [ceil(out / 128), ceil(in / 128)] for blocks, [out, 1] for channels; None for GGUF schemes.
    """

    data: Tensor
    scheme: str
    shape: tuple[int, int]
    scale: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """The tensors as `Scheme.parts` names them."""
        return {"weight": self.data} if self.scale is None else {"weight": self.data, "scale": self.scale}

    def dequantize(self) -> Tensor:
        """The weight in float32, `[out, in]`, a new tensor."""
        return SCHEMES[self.scheme].dequantize(self.parts())

    def take_rows(self, rows: Tensor) -> QuantizedTensor:
        """The rows of the given indices, still quantized: an embedding lookup, or a permutation. A copy.

        Args:
            rows: [n], int64, in any order.

        Raises:
            ModelLoadError: Rows share scales.
        """
        shared = SCHEMES[self.scheme].row_block
        if shared > 1:
            raise ModelLoadError(f"{shared} rows of {self.scheme} share scales and cannot be moved; dequantize first")
        scale = None if self.scale is None else take(self.scale, rows)
        return QuantizedTensor(
            data=take(self.data, rows), scheme=self.scheme, shape=(len(rows), self.shape[1]), scale=scale
        )

    def can_narrow(self, axis: int, start: int, length: int) -> bool:
        """Whether a cut falls between the blocks of the scheme. Arguments as in `narrow`."""
        unit, size = SCHEMES[self.scheme].granularity(axis), self.shape[axis]
        return start % unit == 0 and (length % unit == 0 or start + length == size)

    def narrow(self, axis: int, start: int, length: int) -> QuantizedTensor:
        """A cut of the weight, still quantized; a view.

        Args:
            axis: 0 for rows (out), 1 for columns (in).
            start: First element.
            length: Elements.

        Raises:
            ModelLoadError: The cut is not inside the weight, or goes through a block of the scheme.
        """
        self._check_cut(axis, start, length)
        shape = (length, self.shape[1]) if axis == 0 else (self.shape[0], length)
        elements, num_bytes, _ = GGUF_BLOCKS.get(self.scheme, (1, 1, None))
        if axis == 0:
            data = self.data.narrow(0, start, length)
        else:
            data = self.data.narrow(1, start // elements * num_bytes, length // elements * num_bytes)
        return QuantizedTensor(data=data, scheme=self.scheme, shape=shape, scale=self._cut_scale(axis, start, length))

    def _check_cut(self, axis: int, start: int, length: int) -> None:
        end, size = start + length, self.shape[axis]
        if not 0 <= start < end <= size:
            raise ModelLoadError(f"cannot cut [{start}, {end}) out of the {size} elements of axis {axis}")
        if not self.can_narrow(axis, start, length):
            unit = SCHEMES[self.scheme].granularity(axis)
            raise ModelLoadError(
                f"cannot cut [{start}, {end}) out of axis {axis} of shape {self.shape}: {self.scheme} is cut at "
                f"multiples of {unit}; use fewer tensor-parallel ranks, or --dequantize"
            )

    def _cut_scale(self, axis: int, start: int, length: int) -> Tensor | None:
        if self.scale is None or self.scale.shape[axis] == 1:
            return self.scale
        unit = SCHEMES[self.scheme].granularity(axis)
        return self.scale.narrow(axis, start // unit, math.ceil(length / unit))
