"""Quantized weights and activations read wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed
from core.backend.schemes import GGUF_BLOCKS, SCHEMES, dense_rows
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.planting import before
from core_conformance.mutants.variant import Mutant, kernel_bug

__all__ = ["MUTANTS"]

Parts = Mapping[str, Tensor]


def _misread(scheme: str, change: Callable[[Parts], Parts]) -> Maker:
    """Weights of a scheme are read after `change`, those of all others as they are."""

    def other(op: Any, args: Any) -> Any:
        if op.scheme != scheme:
            return args
        parts = change(args.weight.tensors())
        packed = Packed(shape=args.weight.shape, scheme=scheme, tensors=parts, input_format=args.weight.input_format)
        return dataclasses.replace(args, weight=packed)

    return before(other)


def _bytes_of_blocks(scheme: str, change: Callable[[Tensor], None]) -> Callable[[Parts], Parts]:
    """Bytes of every GGUF block changed in a copy, [rows, blocks, bytes of a block]."""
    num_bytes = GGUF_BLOCKS[scheme][1]

    def changed(parts: Parts) -> Parts:
        blocks = parts["weight"].unflatten(-1, (-1, num_bytes)).clone()
        change(blocks)
        return {"weight": blocks.flatten(-2)}

    return changed


def _zeros(begin: int, end: int) -> Callable[[Tensor], None]:
    def change(blocks: Tensor) -> None:
        blocks[..., begin:end] = 0

    return change


def _nibbles_exchanged(begin: int) -> Callable[[Tensor], None]:
    def change(blocks: Tensor) -> None:
        quants = blocks[..., begin:]
        blocks[..., begin:] = (quants & 15) << 4 | quants >> 4

    return change


def _signs_dropped(begin: int, end: int) -> Callable[[Tensor], None]:
    """Signed bytes lose their sign bit."""

    def change(blocks: Tensor) -> None:
        blocks[..., begin:end] &= 0x7F

    return change


def _scales_kept_in_four_bits(blocks: Tensor) -> None:
    """The upper two bits of the six-bit scales of a super-block's second half are lost."""
    blocks[..., 4:12] &= 0x3F


def _first_scale_for_all(parts: Parts) -> Parts:
    return {**parts, "scale": parts["scale"].flatten()[:1].expand(parts["scale"].shape).clone()}


def _largest_scale_for_all(parts: Parts) -> Parts:
    return {**parts, "scale": parts["scale"].max().expand(parts["scale"].shape).clone()}


def _scale_left_out(parts: Parts) -> Parts:
    return {**parts, "scale": torch.ones_like(parts["scale"])}


def _grid_read_column_first(parts: Parts) -> Parts:
    scale = parts["scale"]
    return {**parts, "scale": scale.flatten().view(scale.shape[::-1]).T.contiguous()}


def _first_zero_for_all(parts: Parts) -> Parts:
    return {**parts, "zero": parts["zero"][..., :1].expand(parts["zero"].shape).clone()}


def _nibbles_of_pairs_exchanged(parts: Parts) -> Parts:
    return {**parts, "weight": (parts["weight"] << 4) | (parts["weight"] >> 4)}


def _x_saturates_at_64(op: Any, args: Any) -> Any:
    """Activations quantized with half of the range of int8."""
    if op.scheme != "int8" or not isinstance(args.x, Tensor):
        return args
    limit = args.x.float().abs().amax(-1, keepdim=True) / 2
    return dataclasses.replace(args, x=args.x.float().clamp(-limit, limit).to(args.x.dtype))


def _scheme(name: str, scheme: str, change: Callable[[Parts], Parts], operation: str = "linear") -> Mutant:
    return kernel_bug(name, f"{operation}/scheme-{scheme}", {operation: _misread(scheme, change)})


def _gguf(name: str, scheme: str, change: Callable[[Tensor], None], operation: str = "linear") -> Mutant:
    return _scheme(name, scheme, _bytes_of_blocks(scheme, change), operation)


def _block_offset_of_row(op: Any, args: Any) -> Any:
    """The scales of a gathered row are those of the row before it."""
    if op.scheme != "int8":
        return args
    scale = args.weight.tensors()["scale"].roll(1, dims=0)
    packed = Packed(shape=args.weight.shape, scheme="int8", tensors={**args.weight.tensors(), "scale": scale})
    return dataclasses.replace(args, weight=packed)


def _dequantized_to_half(op: Any, args: Any) -> Any:
    """Rows are rounded to bfloat16 before they are multiplied and rounded again."""
    if op.scheme == "none":
        return args
    rows = dense_rows(args.weight, torch.arange(args.weight.shape[0])).to(torch.bfloat16)
    packed = Packed(shape=args.weight.shape, scheme="none", tensors={"weight": rows})
    return dataclasses.replace(args, weight=packed)


assert "q4_0" in SCHEMES, "core.backend.schemes registers itself"

MUTANTS: tuple[Mutant, ...] = (
    _scheme("int8 scale per tensor", "int8", _largest_scale_for_all),
    kernel_bug("int8 activations saturate early", "linear/scheme-int8", {"linear": before(_x_saturates_at_64)}),
    _scheme("fp8 scale left out", "fp8_tensor", _scale_left_out),
    _scheme("fp8 channel scale of the first row", "fp8_channel", _first_scale_for_all),
    _scheme("fp8 block scales read column first", "fp8_block", _grid_read_column_first),
    _scheme("int4 zeros of the first group for all", "int4_group", _first_zero_for_all),
    _scheme("int4 nibbles exchanged", "int4_group", _nibbles_of_pairs_exchanged),
    _gguf("q8_0 without signs", "q8_0", _signs_dropped(2, 34)),
    _gguf("q4_0 nibbles exchanged", "q4_0", _nibbles_exchanged(2)),
    _gguf("q4_1 without its minimum", "q4_1", _zeros(2, 4)),
    _gguf("q5_0 without its fifth bits", "q5_0", _zeros(2, 6)),
    _gguf("q5_1 without its minimum", "q5_1", _zeros(2, 4)),
    _gguf("q4_k scales of six bits cut", "q4_k", _scales_kept_in_four_bits),
    _gguf("q5_k without its minimum", "q5_k", _zeros(2, 4)),
    _gguf("q6_k without the signs of its scales", "q6_k", _signs_dropped(192, 208)),
    kernel_bug("gathered rows take another row's scale", "embed/scheme-int8", {"embed": before(_block_offset_of_row)}),
    kernel_bug("gathered rows rounded twice", "embed/scheme", {"embed": before(_dequantized_to_half)}),
    _gguf("gathered q4_1 rows without their minimum", "q4_1", _zeros(2, 4), "embed"),
)
