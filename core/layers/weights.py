"""Bringing stored weights to the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.backend.weights import SCHEMES, Packed, Role
from core.errors import ModelLoadError
from core.layers.context import BuildContext
from core.layers.quantize import QUANTIZERS, QuantizingSource
from core.layers.store import WeightSlice, WeightStore

__all__ = ["WeightSlice", "WeightStore", "check_shape", "fits_scheme", "load_vector", "pack_weight"]


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


def fits_scheme(slices: Sequence[WeightSlice], scheme: str) -> bool:
    """Whether the slices, stored in that scheme, make one weight of it: no block is cut, and none crosses a border."""
    if len(slices) > 1 and scheme == "fp8_tensor":
        return False
    layout = SCHEMES[scheme]
    cuts = [(part.rows, part.shape[0], layout.granularity(0)) for part in slices]
    cuts += [(part.cols, part.shape[1], layout.granularity(1)) for part in slices]
    borders = [part.rows[1] for part in slices[:-1]]
    return all(_aligned(cut, size, unit) for cut, size, unit in cuts) and not any(
        rows % layout.granularity(0) for rows in borders
    )


def _aligned(cut: tuple[int, int], size: int, unit: int) -> bool:
    start, end = cut[0], cut[0] + cut[1]
    return start % unit == 0 and (end % unit == 0 or end == size)


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
