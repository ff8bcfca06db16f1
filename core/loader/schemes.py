"""How weights are stored: every scheme by name, with its block, its bytes and the way back to float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend import gguf_blocks
from core.backend.schemes import SCHEMES
from core.errors import ModelLoadError

__all__ = ["QuantizedTensor", "StorageScheme", "dequantize", "find_scheme", "scheme_names"]


@dataclass(frozen=True, kw_only=True)
class StorageScheme:
    """One way to store a weight `[out, in]`.

    Args:
        name: Name in `TensorInfo.scheme`.
        family: "dense", "gguf" (blocks within a row, scales inside) or "scaled" (elements with a separate scale).
        block_elements: Elements of a row that share a block.
        block_bytes: Bytes of a block.
        block_rows: Rows that share a scale.
        dtype: Element type, for "dense" and "scaled".
        unpack: Bytes `[n, block_bytes]` to values `[n, block_elements]`, for "gguf".
    """

    name: str
    family: str
    block_elements: int = 1
    block_bytes: int
    block_rows: int = 1
    dtype: torch.dtype | None = None
    unpack: Callable[[Tensor], Tensor] | None = None

    def granularity(self, axis: int) -> int:
        """Elements in which a cut along `axis` (0 = out, 1 = in) must be counted."""
        return self.block_rows if axis == 0 else self.block_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A weight as it is stored.

    Args:
        data: [out, bytes_per_row], uint8, read-only: it may be a view of the mapped file.
        scheme: Name of the scheme.
        shape: (out, in), in elements.
        scale: float32, for "scaled" schemes: [ceil(out / block_rows), ceil(in / block_elements)] for blocks,
            [out, 1] for channels, [1, 1] for whole tensors.
    """

    data: Tensor
    scheme: str
    shape: tuple[int, int]
    scale: Tensor | None = None

    def values(self) -> Tensor:
        """The elements in their own type, for "scaled" schemes: `[out, in]`, float8 or int8, a view."""
        dtype = find_scheme(self.scheme).dtype
        assert dtype is not None, self.scheme
        return self.data.view(dtype)

    def dequantize(self) -> Tensor:
        """The weight in float32, `[out, in]`, a new tensor."""
        return dequantize(self)

    def take_rows(self, rows: Tensor) -> QuantizedTensor:
        """The rows of the given indices, still quantized: an embedding lookup, or a permutation.

        Args:
            rows: [n], int64, in any order.
        """
        layout, scale = find_scheme(self.scheme), self.scale
        if scale is not None and len(scale) > 1:
            if layout.block_rows > 1:
                raise ModelLoadError(
                    f"rows of {self.scheme} share scales in blocks of {layout.block_rows}; dequantize first"
                )
            scale = scale[rows]
        shape = (len(rows), self.shape[1])
        return QuantizedTensor(data=self.data[rows], scheme=self.scheme, shape=shape, scale=scale)

    def narrow(self, axis: int, start: int, length: int) -> QuantizedTensor:
        """A cut of the weight, still quantized; a view.

        Args:
            axis: 0 for rows (out), 1 for columns (in).
            start: First element.
            length: Elements.

        Raises:
            ModelLoadError: The cut goes through a block of the scheme.
        """
        layout = find_scheme(self.scheme)
        _check_cut(layout, self.shape, axis, start, length)
        shape = (length, self.shape[1]) if axis == 0 else (self.shape[0], length)
        if axis == 0:
            data = self.data.narrow(0, start, length)
        else:
            unit = layout.block_bytes if layout.family == "gguf" else 1
            step = layout.block_elements if layout.family == "gguf" else 1
            data = self.data.narrow(1, start // step * unit, length // step * unit)
        scale = None if self.scale is None else _narrow_scale(self.scale, layout.granularity(axis), axis, start, length)
        return QuantizedTensor(data=data, scheme=self.scheme, shape=shape, scale=scale)


def find_scheme(name: str) -> StorageScheme:
    """The scheme of that name.

    Raises:
        ModelLoadError: There is none; the message lists all.
    """
    if name not in _SCHEMES:
        raise ModelLoadError(f"quantization scheme {name!r} is unknown; supported are {', '.join(_SCHEMES)}")
    return _SCHEMES[name]


def scheme_names(family: str) -> tuple[str, ...]:
    """Names of the schemes of a family, in the order of the registry."""
    return tuple(name for name, scheme in _SCHEMES.items() if scheme.family == family)


def dequantize(weight: QuantizedTensor) -> Tensor:
    """The weight in float32, `[out, in]`, a new tensor; the arithmetic is that of `core.backend.schemes`."""
    if weight.scale is None:
        return SCHEMES[weight.scheme].dequantize({"weight": weight.data})
    return SCHEMES[weight.scheme].dequantize({"weight": weight.values(), "scale": weight.scale})


def _check_cut(layout: StorageScheme, shape: tuple[int, int], axis: int, start: int, length: int) -> None:
    unit, size = layout.granularity(axis), shape[axis]
    if start < 0 or length < 1 or start + length > size:
        raise ModelLoadError(f"cannot cut [{start}, {start + length}) out of {size} elements of axis {axis}")
    if start % unit or (length % unit and start + length != size):
        raise ModelLoadError(
            f"cannot cut [{start}, {start + length}) out of axis {axis} of a {layout.name} weight of shape {shape}: "
            f"cuts must be multiples of {unit}; use fewer tensor-parallel ranks or an unquantized checkpoint"
        )


def _narrow_scale(scale: Tensor, unit: int, axis: int, start: int, length: int) -> Tensor:
    if scale.shape[axis] == 1:
        return scale
    return scale.narrow(axis, start // unit, math.ceil(length / unit))


def _dense(name: str, dtype: torch.dtype) -> StorageScheme:
    return StorageScheme(name=name, family="dense", block_bytes=dtype.itemsize, dtype=dtype)


def _gguf(name: str, elements: int, num_bytes: int, unpack: Callable[[Tensor], Tensor]) -> StorageScheme:
    return StorageScheme(name=name, family="gguf", block_elements=elements, block_bytes=num_bytes, unpack=unpack)


def _scaled(name: str, dtype: torch.dtype, block: int = 1) -> StorageScheme:
    size = dtype.itemsize * block
    return StorageScheme(
        name=name, family="scaled", block_elements=block, block_bytes=size, block_rows=block, dtype=dtype
    )


_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        _dense("float32", torch.float32),
        _dense("float16", torch.float16),
        _dense("bfloat16", torch.bfloat16),
        _gguf("q8_0", 32, 34, gguf_blocks.q8_0),
        _gguf("q4_0", 32, 18, gguf_blocks.q4_0),
        _gguf("q4_1", 32, 20, gguf_blocks.q4_1),
        _gguf("q5_0", 32, 22, gguf_blocks.q5_0),
        _gguf("q5_1", 32, 24, gguf_blocks.q5_1),
        _gguf("q4_k", 256, 144, gguf_blocks.q4_k),
        _gguf("q5_k", 256, 176, gguf_blocks.q5_k),
        _gguf("q6_k", 256, 210, gguf_blocks.q6_k),
        _scaled("fp8_block", torch.float8_e4m3fn, 128),
        _scaled("fp8_channel", torch.float8_e4m3fn),
        _scaled("fp8_tensor", torch.float8_e4m3fn),
        _scaled("int8", torch.int8),
    )
}
