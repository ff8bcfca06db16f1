"""Weights: whence they come (`WeightSource`), how they are stored (`Scheme`), how a backend keeps them (`Packed`)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

__all__ = ["SCHEMES", "Packed", "Quantized", "Role", "Scheme", "WeightSource", "register_scheme"]

Role = Literal["linear", "embedding", "tied", "experts"]
"""What a weight is for. "tied" serves both the embedding and the head."""


@dataclass(slots=True, kw_only=True)
class Quantized:
    """An activation in a quantized format.

    Args:
        q: [T, K], int8 or float8.
        scale: [T, 1] for per-row formats, [T, ceil(K / block)] for block formats; float32: value = q * scale.
        format: "int8_row", "int8_block32", "fp8_row" or "fp8_block128".
    """

    q: Tensor
    scale: Tensor
    format: str


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How the elements of a weight [..., N, K] are stored in a checkpoint.

    Args:
        name: The word in `OpSpec.scheme` ("none", "int8", "fp8_tensor", "fp8_channel", "fp8_block", "int4_group",
            "q4_1", ...).
        parts: Names of the tensors of a source; "weight" first.
        block: Elements along K that share a scale (the whole row is 0).
        row_block: Rows of N that share a scale.
        dequantize: parts -> [..., N, K], float32.
        bits: Bits an element, scales included, for people and for sizing.
    """

    name: str
    parts: tuple[str, ...]
    block: int
    dequantize: Callable[[Mapping[str, Tensor]], Tensor] = field(repr=False)
    bits: float
    row_block: int = 1

    def granularity(self, axis: int) -> int:
        """Multiple at which `axis` (0 is N, 1 is K) may be cut for tensor parallelism."""
        return self.row_block if axis == 0 else max(self.block, 1)


SCHEMES: dict[str, Scheme] = {}
"""Every scheme by name; `core.backend.schemes` fills it."""


def register_scheme(scheme: Scheme) -> Scheme:
    """Adds a scheme to `SCHEMES` and returns it."""
    SCHEMES[scheme.name] = scheme
    return scheme


class WeightSource(abc.ABC):
    """One logical weight in a checkpoint, already cut for this rank; read when asked, not before.

    Attributes:
        name: Name in the checkpoint, for messages; fused sources join names with "+".
        shape: Logical shape: [N, K], or [experts, N, K].
        scheme: Name of the scheme in which the parts are stored.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str

    @abc.abstractmethod
    def parts(self) -> Mapping[str, Tensor]:
        """Host tensors as `Scheme.parts` names them; may be views of a memory map, so read-only."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, dequantized where it is stored in a quantized scheme. Peak: one tensor."""
        parts = self.parts()
        if self.scheme == "none":
            return parts["weight"].to(dtype)
        return SCHEMES[self.scheme].dequantize(parts).to(dtype)


class Packed:
    """A weight as a backend's kernels want it. A backend may subclass it; this base keeps the scheme's own parts.

    Args:
        shape: Logical shape, as in `WeightSource`.
        scheme: How it is stored; "none" is dense.
        tensors: Parts by name. Role "experts" is expert-major in every tensor, so that rebalancing copies rows.
        input_format: Format of `Quantized` that the kernel takes; None for plain tensors.
        aliases_source: Whether the tensors are views of the checkpoint's memory.
    """

    __slots__ = ("_tensors", "aliases_source", "input_format", "scheme", "shape")

    def __init__(
        self,
        *,
        shape: Sequence[int],
        scheme: str,
        tensors: Mapping[str, Tensor],
        input_format: str | None = None,
        aliases_source: bool = False,
    ) -> None:
        self.shape = tuple(shape)
        self.scheme = scheme
        self.input_format = input_format
        self.aliases_source = aliases_source
        self._tensors = dict(tensors)

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors that hold the weight; their addresses never change."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self._tensors.values())

    def update_(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces the contents in place, so that captured graphs stay valid.

        Args:
            weights: Tensors by the names and with the shapes and dtypes of `tensors()`.

        Raises:
            ValueError: a name, shape or dtype differs; nothing was written.
        """
        for name, tensor in self._tensors.items():
            new = weights.get(name)
            if new is None or new.shape != tensor.shape or new.dtype != tensor.dtype:
                got = "nothing" if new is None else f"{tuple(new.shape)} {new.dtype}"
                raise ValueError(f"part {name!r} must be {tuple(tensor.shape)} {tensor.dtype}, got {got}")
        for name, tensor in self._tensors.items():
            tensor.copy_(weights[name])

    def dense(self) -> Tensor:
        """The weight in float32 (dense weights: in their own dtype). For composites and tests.

        A backend that packs into a private form overrides this or declares operations on it NATIVE or NO.
        """
        if self.scheme == "none":
            return self._tensors["weight"]
        return SCHEMES[self.scheme].dequantize(self._tensors)
