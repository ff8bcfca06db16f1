"""Weights in panels: how each scheme is stored, and packing."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from core_cpu import _kernels
from core_cpu.kernels.arguments import DTYPE_CODES, require
from core_cpu.kernels.weight_memory import MEMORY

__all__ = ["PackedWeight", "Scheme", "pack"]


class Scheme(enum.IntEnum):
    """How a packed weight is stored; values are those of the extension."""

    F32 = 0
    BF16 = 1
    F16 = 2
    INT8 = 3
    FP8 = 4
    Q8_0 = 5
    Q4_0 = 6
    Q4_1 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q4_K = 10
    Q5_K = 11
    Q6_K = 12


_DENSE = {torch.float32: Scheme.F32, torch.bfloat16: Scheme.BF16, torch.float16: Scheme.F16}
_GGUF_BLOCKS = {
    Scheme.Q8_0: (32, 34),
    Scheme.Q4_0: (32, 18),
    Scheme.Q4_1: (32, 20),
    Scheme.Q5_0: (32, 22),
    Scheme.Q5_1: (32, 24),
    Scheme.Q4_K: (256, 144),
    Scheme.Q5_K: (256, 176),
    Scheme.Q6_K: (256, 210),
}
_FP8_TILE_FACTOR = 256.0
"""FP8 panels expand to value * 2^-8; the row scale makes up for it."""


class PackedWeight:
    """A weight [n, k] in panels of 16 rows; made by `pack`.

    Attributes:
        scheme: How it is stored.
        shape: (n, k).
        tensors: What holds it: "panels" (uint8), and by scheme "row_scale", "block_scale" (float32), "row_sum" (int32).
            Their contents may be replaced, their addresses must stay.
    """

    __slots__ = ("handle", "scheme", "shape", "tensors")

    def __init__(self, scheme: Scheme, shape: tuple[int, int], tensors: dict[str, Tensor]) -> None:
        self.scheme = scheme
        self.shape = shape
        self.tensors = tensors
        parts = {name: t.data_ptr() for name, t in tensors.items() if name != "panels"}
        self.handle = _kernels.Weight(int(scheme), *shape, tensors["panels"].data_ptr(), **parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def pack(weight: Tensor, scheme: Scheme | None = None, scale: Tensor | None = None) -> PackedWeight:
    """Brings a checkpoint's weight into panels.

    Args:
        weight: [n, k] float32, bfloat16 or float16 (dense), int8, or float8_e4m3fn; [n, bytes of a row], uint8, for
            the GGUF schemes. Contiguous in the last dim, read-only, not kept.
        scheme: How to keep it; None keeps a dense, int8 or FP8 weight as it is.
        scale: int8: [n] or [n, 1]. FP8: one element, [n] or [n, 1], or [ceil(n / 128), ceil(k / 128)]. Float32,
            bfloat16, or UE8M0 exponents (float8_e8m0fnu, or uint8).
    """
    require(weight.dim() == 2 and weight.stride(1) == 1, f"weight must be [n, k] rows, got {tuple(weight.shape)}")
    scheme = _scheme_of(weight) if scheme is None else scheme
    n, k = weight.shape[0], _logical_columns(weight, scheme)
    require(n > 0 and k > 0, f"weight must not be empty, got {(n, k)}")
    padded = -(-n // 16) * 16
    tensors = {"panels": MEMORY.take(_kernels.packed_bytes(int(scheme), n, k))}
    parts: dict[str, Tensor] = {}
    if scheme is Scheme.INT8:
        parts["row_sum"] = tensors["row_sum"] = torch.empty(padded, dtype=torch.int32)
    if scheme is Scheme.FP8:
        parts["row_nan"] = torch.empty(padded, dtype=torch.uint8)
    source_dtype = DTYPE_CODES.get(weight.dtype, 0)
    row_bytes = weight.stride(0) * weight.element_size()
    addresses = {name: t.data_ptr() for name, t in parts.items()}
    _kernels.pack(
        int(scheme), n, k, weight.data_ptr(), row_bytes, source_dtype, tensors["panels"].data_ptr(), **addresses
    )
    if scheme in (Scheme.INT8, Scheme.FP8):
        require(scale is not None, f"a weight of scheme {scheme.name} needs a scale")
        assert scale is not None
        tensors |= _scales(scheme, scale, n, k, parts.get("row_nan"))
    return PackedWeight(scheme, (n, k), tensors)


def _scheme_of(weight: Tensor) -> Scheme:
    if weight.dtype == torch.int8:
        return Scheme.INT8
    if weight.dtype == torch.float8_e4m3fn:
        return Scheme.FP8
    found = _DENSE.get(weight.dtype)
    if found is None:
        raise ValueError(f"name the scheme of a weight in {weight.dtype}")
    return found


def _logical_columns(weight: Tensor, scheme: Scheme) -> int:
    if scheme not in _GGUF_BLOCKS:
        wanted = {Scheme.INT8: (torch.int8,), Scheme.FP8: (torch.float8_e4m3fn,)}.get(scheme, tuple(_DENSE))
        require(weight.dtype in wanted, f"scheme {scheme.name} cannot hold a weight in {weight.dtype}")
        return weight.shape[1]
    elements, num_bytes = _GGUF_BLOCKS[scheme]
    ok = weight.dtype == torch.uint8 and weight.shape[1] % num_bytes == 0
    require(ok, f"{scheme.name} rows are uint8 in blocks of {num_bytes} bytes, got {weight.dtype} {weight.shape[1]}")
    return weight.shape[1] // num_bytes * elements


def _scale_values(scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.reshape(scale.shape or (1,)).to(torch.float32)


def _scales(scheme: Scheme, scale: Tensor, n: int, k: int, row_nan: Tensor | None) -> dict[str, Tensor]:
    """Row scales [padded n], and block scales [panels, ceil(k / 128)] where the weight has them."""
    values = _scale_values(scale)
    rows = torch.zeros(-(-n // 16) * 16)
    factor = _FP8_TILE_FACTOR if scheme is Scheme.FP8 else 1.0
    blocks = (-(-n // 128), -(-k // 128))
    out: dict[str, Tensor] = {"row_scale": rows}
    if (
        values.numel() == n and values.shape[0] in (1, n) and (values.shape != blocks or scheme is Scheme.INT8)
    ) or values.numel() == 1:
        rows[:n] = values.flatten() * factor
    else:
        require(
            scheme is Scheme.FP8 and tuple(values.shape) == blocks,
            f"scale of a {scheme.name} weight {(n, k)} must have 1 element, {n}, or shape {blocks}, "
            f"got {tuple(values.shape)}",
        )
        rows[:n] = factor
        panels = torch.arange(len(rows) // 16) * 16 // 128
        out["block_scale"] = values.index_select(0, panels).contiguous()
    if row_nan is not None:
        rows.masked_fill_(row_nan != 0, torch.nan)
    return out
