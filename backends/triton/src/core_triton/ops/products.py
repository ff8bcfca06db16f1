"""Which kernel form multiplies an activation with a weight as it is stored, and how it is tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend import Packed, Quantized
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__ = ["SCHEMES", "Form", "form_of", "input_format", "table", "weight_parts"]

SCHEMES = ("none", "int8", "fp8_tensor", "fp8_channel", "fp8_block", "int4_group")
"""Schemes of weights that the kernels read as they are stored."""

_FP8_BLOCK = 128
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True, kw_only=True)
class Form:
    """Constants of `tile_product`, and the tuning file that goes with them."""

    form: str
    table: str
    x_group: int = 0
    w_group: int = 0
    w_rows: int = 0
    x_factor: int = 0
    fnuz: bool = False

    def constexprs(self) -> dict[str, object]:
        """As the kernels name them."""
        return {
            "FORM": self.form,
            "X_GROUP": self.x_group,
            "W_GROUP": self.w_group,
            "W_ROWS": self.w_rows,
            "X_FACTOR": self.x_factor,
            "FNUZ": self.fnuz,
        }

    def tuned(self, target: Target) -> dict[str, Tuning]:
        """By shape class; a tile of K holds no two groups."""
        return tunings(self.table, target)

    def block_k(self, tuning: Tuning) -> int:
        """Elements along K of a tile: no tile holds two groups."""
        return min(tuning["BLOCK_K"], self.x_group or 1 << 30, self.w_group or 1 << 30)


def input_format(scheme: str, target: Target) -> str | None:
    """Format of activations in which a weight of that scheme is multiplied fastest."""
    if scheme == "int8":
        return "int8_row"
    if not scheme.startswith("fp8") or target.fp8_dtype is None:
        return None
    return "fp8_block128" if scheme == "fp8_block" else "fp8_row"


def table(x_dtype: torch.dtype, form: str) -> str:
    """Name of the tuning file."""
    if form in ("fp8", "int8"):
        return "linear_eight_bit"
    if x_dtype == torch.float32:
        return "linear_float32"
    return {"dense": "linear_dense", "int4": "linear_int4"}.get(form, "linear_wide_x")


def form_of(x: Tensor | Quantized, weight: Packed, target: Target) -> Form:
    """The form for these tensors; only types and shapes are looked at."""
    parts = weight.tensors()
    stored, scheme = parts["weight"], weight.scheme
    plain = x if isinstance(x, Tensor) else x.q
    if scheme == "none":
        form = "float32" if plain.dtype != stored.dtype else "dense"
        return Form(form="dense", table=table(torch.float32 if form == "float32" else plain.dtype, "dense"))
    if scheme == "int8":
        return Form(form="int8", table=table(plain.dtype, "int8"), w_rows=1, x_factor=1)
    if scheme == "int4_group":
        group = 2 * stored.shape[-1] // parts["scale"].shape[-1]
        return Form(form="int4", table=table(plain.dtype, "int4"), w_group=group, w_rows=1)
    block = scheme == "fp8_block"
    w_group, w_rows = (_FP8_BLOCK, _FP8_BLOCK) if block else (0, 1)
    fnuz = stored.dtype == torch.float8_e4m3fnuz
    if isinstance(x, Quantized):
        x_group = _FP8_BLOCK if x.format == "fp8_block128" else 0
        factor = 2 if fnuz else 1
        return Form(
            form="fp8", table=table(plain.dtype, "fp8"), x_group=x_group, w_group=w_group, w_rows=w_rows,
            x_factor=factor, fnuz=fnuz,
        )  # fmt: skip
    form = "fp8_cast" if target.fp8 else "fp8_bits"
    return Form(form=form, table=table(plain.dtype, form), w_group=w_group, w_rows=w_rows, fnuz=fnuz)


def weight_parts(weight: Packed, form: Form) -> Mapping[str, Tensor]:
    """The tensors as the kernels take them: bytes where the chip knows no such type, and stand-ins for what is not."""
    parts = dict(weight.tensors())
    stored = parts["weight"]
    if form.form == "fp8_bits":
        parts["weight"] = stored.view(torch.uint8)
    scale = parts.get("scale", stored)
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    parts["scale"] = scale
    parts.setdefault("zero", stored)
    return parts
