"""Which part of which stored weight a layer wants, and the store that hands it out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from core.backend.weights import SCHEMES, Packed, Role, WeightSource
from core.errors import ModelLoadError
from core.layers.context import BuildContext
from core.layers.quantize import QUANTIZERS, QuantizingSource

__all__ = ["WeightSlice", "WeightStore", "can_fuse", "check_shape", "load_vector", "pack_weight"]


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


def pack_weight(
    ctx: BuildContext, store: WeightStore, slices: Sequence[WeightSlice], scheme: str, role: Role
) -> Packed:
    """One weight on the device in the scheme that was chosen for it; peak of one weight.

    Raises:
        ModelLoadError: A part is missing or of another shape than the configuration promises.
    """
    for part in slices:
        check_shape(store, part.name, part.shape)
    source = store.source(slices)
    if scheme != source.scheme and scheme in QUANTIZERS:
        source = QuantizingSource(source, scheme)
    return ctx.binder.backend.pack(source, SCHEMES[scheme], role, ctx.torch_dtype)


def can_fuse(slices: Sequence[WeightSlice], scheme: str) -> bool:
    """Whether the slices, stored in that scheme, can stand one below the other in one weight of it."""
    if len(slices) == 1:
        return True
    block = SCHEMES[scheme].row_block
    return scheme != "fp8_tensor" and all(part.rows[1] % block == 0 for part in slices[:-1])


def check_shape(store: WeightStore, name: str, shape: tuple[int, ...]) -> None:
    """Raises ModelLoadError where a stored weight has another shape than the configuration promises."""
    stored = tuple(store.shape(name))
    if stored != shape:
        raise ModelLoadError(
            f"{name} has shape {list(stored)}, the configuration asks for {list(shape)}; "
            "config.json and weights are not of one model, fetch both again"
        )


def load_vector(
    store: WeightStore, ctx: BuildContext, name: str, size: int, share: tuple[int, int] | None = None
) -> Tensor:
    """A stored vector of `size` elements in the model's dtype, on the device.

    Args:
        share: (start, length) of what this rank keeps; None for all.
    """
    check_shape(store, name, (size,))
    start, length = share or (0, size)
    cut = store.tensor(name)[start : start + length]
    return cut.to(device=ctx.device, dtype=ctx.torch_dtype, copy=True).contiguous()
