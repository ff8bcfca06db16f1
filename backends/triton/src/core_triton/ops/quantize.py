"""Activations in 8 bits for products that ask for them."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import Quantized
from core_triton.ops.rows import row_tiles
from core_triton.target import Target

__all__ = ["FORMATS", "empty_quantized", "quantize_rows"]

FORMATS = ("int8_row", "fp8_row", "fp8_block128")
"""Formats of activations that the kernels write."""

_FP8_BLOCK = 128


def empty_quantized(rows: int, dim: int, form: str, device: torch.device) -> Quantized:
    """Room for [rows, dim] in that format; 8-bit floats are e4m3fn on every chip."""
    kind = torch.int8 if form == "int8_row" else torch.float8_e4m3fn
    scales = -(-dim // _FP8_BLOCK) if form == "fp8_block128" else 1
    return Quantized(
        q=torch.empty(rows, dim, dtype=kind, device=device),
        scale=torch.empty(rows, scales, dtype=torch.float32, device=device),
        format=form,
    )


def quantize_rows(x: Tensor, form: str, target: Target) -> Quantized:
    """Rows [T, K], contiguous in the last dim, in that format."""
    from core_triton.kernels.quantize import quantize_rows_kernel

    rows, dim = x.shape
    to = empty_quantized(rows, dim, form, x.device)
    if rows:
        tiles = row_tiles(dim, target, _FP8_BLOCK)
        quantize_rows_kernel[(tiles.programs(rows),)](
            x, to.q.view(torch.uint8) if to.q.is_floating_point() else to.q, to.scale, rows, dim, x.stride(0),
            FORMAT=form, **tiles.launch(),
        )  # fmt: skip
    return to
