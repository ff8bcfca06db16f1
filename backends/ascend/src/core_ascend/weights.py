"""Weights as the calls want them: transposed, and in fractals where a product of one matrix reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.backend import Packed, WeightSource, torch_dtype
from core_ascend.chips import Chip
from core_ascend.limits import INT4_ROWS, MAX_INNER
from core_ascend.vendor import FRACTAL_NZ, PLAIN, npu

__all__ = ["AscendPacked", "has_call", "pack"]

_PART = 65408
"""Rows of a part of a weight that is too wide: the largest multiple of 128 below the bound."""


def has_call(source: WeightSource, scheme: str, role: str, dtype: torch.dtype, chip: Chip) -> bool:
    """Whether a product of the chip reads such a weight in a form of its own; else it stays as the core keeps it."""
    halves = set(map(torch_dtype, chip.halves))
    if role in ("embedding", "tied"):
        return False
    if scheme == "none":
        return dtype in halves | {torch.float32}
    if not chip.row_scales or dtype not in halves or source.shape[-1] > MAX_INNER:
        return False
    if scheme == "int4_group":
        # The call takes scales in the model's type, and bfloat16 has too few digits for them.
        exact = dtype is torch.float16
        return exact and role == "linear" and source.shape[-2] <= MAX_INNER and source.shape[-2] % INT4_ROWS == 0
    return scheme == "int8"


class AscendPacked(Packed):
    """A weight [.., N, K] kept as [.., K, N].

    Args:
        shape: Logical shape.
        scheme: Its name in the contract.
        tensors: "weight" or, of one that is too wide for a call, "weight0", "weight1" ..., with "scale" beside each.
        fractal: Whether the weights are in fractals.
        group_size: Elements along K that share a scale; 0 where a row does.
    """

    __slots__ = ("fractal", "group_size")

    def __init__(
        self,
        *,
        shape: Sequence[int],
        scheme: str,
        tensors: Mapping[str, Tensor],
        fractal: bool,
        input_format: str | None = None,
        group_size: int = 0,
    ) -> None:
        super().__init__(shape=shape, scheme=scheme, tensors=tensors, input_format=input_format)
        self.fractal = fractal
        self.group_size = group_size

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight [.., K, N], scale) of each part, in the order of their columns."""
        tensors = self.tensors()
        names = [name for name in tensors if name.startswith("weight")]
        return [(tensors[name], tensors.get(name.replace("weight", "scale"))) for name in names]

    def dense(self) -> Tensor:
        """[.., N, K]: float32 of a quantized weight, else its own type."""
        if self.scheme == "int4_group":
            return self._dense_int4()
        wholes = []
        for weight, scale in self.parts():
            plain = npu().npu_format_cast(weight, PLAIN) if self.fractal else weight
            rows = plain.transpose(-2, -1)
            if scale is not None:
                rows = rows.float() * scale.float().unsqueeze(-1)
            wholes.append(rows)
        return torch.cat(wholes, dim=-2) if len(wholes) > 1 else wholes[0]

    def _dense_int4(self) -> Tensor:
        """By a product with ones on the diagonal: how the call orders its words is its own affair."""
        tensors = self.tensors()
        scale, rows = tensors["scale"], self.shape[-1]
        ones = torch.eye(rows, dtype=scale.dtype, device=scale.device)
        columns: Tensor = npu().npu_weight_quant_batchmatmul(
            ones, tensors["weight"], scale, antiquant_offset=tensors["offset"], antiquant_group_size=self.group_size
        )
        return columns.t().float()


def pack(source: WeightSource, scheme: str, role: str, dtype: torch.dtype, device: torch.device) -> AscendPacked:
    """One weight, transposed; the matrix of a linear layer in fractals where its type has them."""
    if scheme == "int8":
        return _pack_int8(source, role, device)
    if scheme == "int4_group":
        return _pack_int4(source, dtype, device)
    weight = source.dense(dtype).to(device).transpose(-2, -1).contiguous()
    fractal = role == "linear" and dtype in (torch.float16, torch.bfloat16)
    if fractal:
        weight = npu().npu_format_cast(weight, FRACTAL_NZ)
    return AscendPacked(shape=source.shape, scheme="none", tensors={"weight": weight}, fractal=fractal)


def _pack_int8(source: WeightSource, role: str, device: torch.device) -> AscendPacked:
    found = source.parts()
    weight, scale = found["weight"], found["scale"].float().squeeze(-1)
    rows = weight.shape[-2]
    cuts = range(0, rows, _PART) if rows > MAX_INNER else range(0, rows, rows)
    tensors: dict[str, Tensor] = {}
    for index, start in enumerate(cuts):
        width = _PART if rows > MAX_INNER else rows
        part = weight[..., start : start + width, :].to(device).transpose(-2, -1).contiguous()
        suffix = str(index) if rows > MAX_INNER else ""
        tensors[f"weight{suffix}"] = npu().npu_format_cast(part, FRACTAL_NZ) if role == "linear" else part
        tensors[f"scale{suffix}"] = scale[..., start : start + width].to(device).contiguous()
    return AscendPacked(
        shape=source.shape, scheme="int8", tensors=tensors, fractal=role == "linear", input_format="int8_row"
    )


def _pack_int4(source: WeightSource, dtype: torch.dtype, device: torch.device) -> AscendPacked:
    """Codes around zero, eight to a word, and scale and offset of each group along K in the model's type."""
    found = source.parts()
    low = found["weight"].to(device)
    codes = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2).t().to(torch.int32) - 8
    scale, zero = (found[name].to(device).t().contiguous() for name in ("scale", "zero"))
    groups = scale.shape[0]
    tensors = {
        "weight": npu().npu_convert_weight_to_int4pack(codes.contiguous()),
        "scale": scale.to(dtype),
        "offset": (8 - zero.to(torch.float32)).to(dtype),
    }
    group_size = source.shape[-1] // groups if groups > 1 else 0
    return AscendPacked(shape=source.shape, scheme="int4_group", tensors=tensors, fractal=False, group_size=group_size)
