"""What a checkpoint looks like to a model: blocks of stored matrices, and the store that hands them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.backend.weights import WeightSource

__all__ = ["WeightSlice", "WeightStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlice:
    """A block of rows and columns of one stored matrix [out, in].

    Args:
        name: Name in the checkpoint, as Hugging Face has it.
        shape: Whole shape that the configuration promises.
        rows: (start, length) along `out`.
        cols: (start, length) along `in`.
    """

    name: str
    shape: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]

    @classmethod
    def whole(cls, name: str, out_features: int, in_features: int) -> WeightSlice:
        """The matrix uncut."""
        return cls(name=name, shape=(out_features, in_features), rows=(0, out_features), cols=(0, in_features))

    @property
    def bias_name(self) -> str:
        """Name of the bias that is stored beside it."""
        return self.name.removesuffix("weight") + "bias"


class WeightStore(Protocol):
    """The weights of a checkpoint by name. Knows shapes and schemes of all of them without reading any."""

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in elements.

        Raises:
            ModelLoadError: There is no such weight; the message names it.
        """
        ...

    def scheme(self, name: str) -> str:
        """Scheme in which it is stored, a key of `core.backend.weights.SCHEMES`; "none" is dense."""
        ...

    def require(self, names: Iterable[str]) -> None:
        """Checks that all these weights are there, before any is read.

        Raises:
            ModelLoadError: Some are not; the message names them.
        """
        ...

    def source(self, slices: Sequence[WeightSlice]) -> WeightSource:
        """One logical weight of the slices' rows, one slice below the other; dense where their schemes differ.

        Raises:
            ModelLoadError: A weight is missing. Its `parts()` raise it where a cut goes through a block of the scheme.
        """
        ...

    def tensor(self, name: str) -> Tensor:
        """A weight as dense numbers on the host, read-only: norms and biases."""
        ...
