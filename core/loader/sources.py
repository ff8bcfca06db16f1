"""Weights as the contract wants them handed over: one logical weight each, cut, fused or stacked, read when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from core.backend.schemes import SCHEMES, raw
from core.backend.weights import WeightSource
from core.errors import ModelLoadError
from core.layers import WeightSlice
from core.loader.quantized import QuantizedTensor
from core.loader.tensor_info import Checkpoint

__all__ = ["FusedSource", "SliceSource", "StackedSource"]


class SliceSource(WeightSource):
    """A block of rows and columns of one stored matrix.

    Args:
        checkpoint: Where it is read from; must stay open until it was.
        part: Which matrix, and what of it.
        on_read: Called with the name when it is read.

    Raises:
        ModelLoadError: There is no such tensor.
    """

    def __init__(self, checkpoint: Checkpoint, part: WeightSlice, on_read: Callable[[str], None]) -> None:
        self.name = part.name
        self.shape = (part.rows[1], part.cols[1])
        self.scheme = checkpoint.info(part.name).scheme
        self._checkpoint, self._part, self._on_read = checkpoint, part, on_read

    def parts(self) -> Mapping[str, Tensor]:
        """Host tensors as `Scheme.parts` names them; may be views of a memory map, so read-only.

        Raises:
            ModelLoadError: The cut goes through a block of the scheme.
        """
        self._on_read(self.name)
        if self.scheme == "none":
            return {"weight": _cut(self._checkpoint.load(self.name), self._part)}
        return self._quantized().parts()

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, dequantized where it is stored in a quantized scheme. Any cut. Peak: one tensor."""
        self._on_read(self.name)
        if self.scheme == "none":
            return _cut(self._checkpoint.load(self.name), self._part).to(dtype)
        weight, part = self._stored(), self._part
        if weight.can_narrow(0, *part.rows) and weight.can_narrow(1, *part.cols):
            return self._quantized().dequantize().to(dtype)
        return _cut(weight.dequantize(), part).to(dtype)

    def _stored(self) -> QuantizedTensor:
        weight = self._checkpoint.load_quantized(self.name)
        assert weight is not None, self.name
        return weight

    def _quantized(self) -> QuantizedTensor:
        try:
            return self._stored().narrow(0, *self._part.rows).narrow(1, *self._part.cols)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.name}: {error}") from error


class FusedSource(WeightSource):
    """Weights one below the other as one: [sum of N, K].

    Sources of different schemes are a dense weight together: scheme "none".

    Args:
        sources: From the top.
    """

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        schemes = {source.scheme for source in sources}
        self.name = "+".join(source.name for source in sources)
        self.shape = (sum(source.shape[0] for source in sources), sources[0].shape[1])
        self.scheme = schemes.pop() if len(schemes) == 1 else "none"
        self._sources = tuple(sources)

    def parts(self) -> Mapping[str, Tensor]:
        """Host tensors as `Scheme.parts` names them, new.

        Raises:
            ModelLoadError: A cut, or the border between two weights, goes through a block of the scheme.
        """
        if any(source.scheme != self.scheme for source in self._sources):
            return {"weight": self.dense(torch.float32)}
        self._check_borders()
        return _join([source.parts() for source in self._sources], torch.cat)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`. Peak: the result and one of its sources."""
        out = torch.empty(self.shape, dtype=dtype)
        begin = 0
        for source in self._sources:
            out[begin : begin + source.shape[0]] = source.dense(dtype)
            begin += source.shape[0]
        return out

    def _check_borders(self) -> None:
        unit = SCHEMES[self.scheme].row_block
        for source in self._sources[:-1]:
            if source.shape[0] % unit:
                raise ModelLoadError(
                    f"{source.name} has {source.shape[0]} rows here, {self.scheme} is fused at multiples of {unit}; "
                    "use fewer tensor-parallel ranks, or --dequantize"
                )


class StackedSource(WeightSource):
    """Experts as one weight, [experts, N, K], expert-major in every part.

    Args:
        sources: One for each expert, of equal shape and scheme.

    Raises:
        ModelLoadError: They differ.
    """

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        first = sources[0]
        for source in sources:
            if (source.shape, source.scheme) != (first.shape, first.scheme):
                raise ModelLoadError(
                    f"experts {first.name} ({first.scheme} {first.shape}) and {source.name} ({source.scheme} "
                    f"{source.shape}) differ and cannot be stacked; use a checkpoint whose experts are alike"
                )
        self.name, self.scheme = f"{first.name} and {len(sources) - 1} more", first.scheme
        self.shape = (len(sources), *first.shape)
        self._sources = tuple(sources)

    def parts(self) -> Mapping[str, Tensor]:
        """Host tensors as `Scheme.parts` names them, new, experts first."""
        return _join([source.parts() for source in self._sources], torch.stack)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weights in `dtype`, [experts, N, K]. Peak: the result and one expert."""
        out = torch.empty(self.shape, dtype=dtype)
        for expert, source in zip(out, self._sources, strict=True):
            expert.copy_(source.dense(dtype))
        return out


def _join(parts: Sequence[Mapping[str, Tensor]], join: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """Each part of all weights as one tensor; 8-bit floats as bytes, which any torch can join."""
    return {name: join([raw(part[name]) for part in parts]).view(parts[0][name].dtype) for name in parts[0]}


def _cut(values: Tensor, part: WeightSlice) -> Tensor:
    return values.narrow(0, *part.rows).narrow(1, *part.cols)
