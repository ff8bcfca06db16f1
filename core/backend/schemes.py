"""Every way to store a weight, registered in `SCHEMES`; the one home of dequantization and quantization.

Parts of a weight [..., N, K] (experts lead with their own dim):

- none: weight, in any float type.
- int8: weight int8 [..., N, K], scale float32 [..., N, 1]. A linear of it quantizes its activations by `int8_row`, or
  to the format that its Verdict declares where `LinearOp.quantize_activations` lets it choose.
- fp8_tensor, fp8_channel: weight float8_e4m3fn [..., N, K], scale float32, broadcast to [..., 1, 1] or [..., N, 1].
- fp8_block: weight float8_e4m3fn [..., N, K], scale [..., ceil(N / 128), ceil(K / 128)]: float32, bfloat16, or powers
  of two as float8_e8m0fnu or as their uint8 exponents (value 2^(e - 127)).
- int4_group: weight uint8 [..., N, K / 2], element 2i in the low four bits of byte i, 2i + 1 in the high ones; scale
  [..., N, K / group], any float type, and zero uint8 of the same shape: value = (element - zero) * scale. Groups of 32,
  64 or 128 elements along K, as the shapes say.
- q8_0 ... q6_k: weight uint8 [..., N, bytes of a row], the blocks of GGUF, scales inside.

Formats of activations are those of `quantize_rows`, and "int16_row", which attention rounds to where
`AttentionOp.quantize_activations` and its Verdict say so: integers by rounding to nearest, the largest magnitude of a
query (token, head), of a key and of a value 2,047 or more. Probabilities, each times its value's scale, share a scale
within the chunk of at most 128 consecutive keys of their query and head; the largest becomes 8,191 or more. So nothing
moves by more than 2^-12 of a row's largest magnitude, a probability by 2^-14 of its chunk's largest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from core.backend import gguf_blocks
from core.backend.weights import SCHEMES, Packed, Quantized, Scheme, register_scheme

__all__ = [
    "FP8_BLOCK",
    "GGUF_BLOCKS",
    "INT4_GROUPS",
    "SCHEMES",
    "dense_rows",
    "int8_block32",
    "int8_row",
    "quantize_fp8_block",
    "quantize_fp8_channel",
    "quantize_fp8_tensor",
    "quantize_int4_group",
    "quantize_int8",
    "quantize_rows",
    "raw",
    "scale_values",
    "take",
]

FP8_BLOCK = 128
"""Rows and columns that share a scale in scheme fp8_block."""

INT4_GROUPS = (32, 64, 128)
"""Elements along K that may share a scale and a zero in scheme int4_group."""

_CHUNK_ELEMENTS = 1 << 20
"""Elements dequantized at a time: keeps temporaries in cache and the peak at one tensor."""

_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_TINY = torch.finfo(torch.float32).tiny

GGUF_BLOCKS: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "q8_0": (32, 34, gguf_blocks.q8_0),
    "q4_0": (32, 18, gguf_blocks.q4_0),
    "q4_1": (32, 20, gguf_blocks.q4_1),
    "q5_0": (32, 22, gguf_blocks.q5_0),
    "q5_1": (32, 24, gguf_blocks.q5_1),
    "q4_k": (256, 144, gguf_blocks.q4_k),
    "q5_k": (256, 176, gguf_blocks.q5_k),
    "q6_k": (256, 210, gguf_blocks.q6_k),
}
"""GGUF schemes: elements of a block, its bytes, and blocks [n, bytes] -> [n, elements], float32."""


def raw(x: Tensor) -> Tensor:
    """The same memory as bytes for 8-bit floats, which few devices can index; other tensors as they are."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` along dim 0, `x[index]`, for every element type. A new tensor."""
    return raw(x).index_select(0, index.long()).view(x.dtype)


def scale_values(scale: Tensor) -> Tensor:
    """Scales in float32, whether numbers or UE8M0 exponents (float8_e8m0fnu or uint8)."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def dense_rows(weight: Packed, rows: Tensor) -> Tensor:
    """Rows of a weight [N, K]: [n, K], float32 (dense weights: their own dtype). Nothing else is dequantized."""
    if type(weight).dense is not Packed.dense:
        return take(weight.dense(), rows)
    parts = weight.tensors()
    values = take(parts["weight"], rows)
    if weight.scheme == "none":
        return values
    scheme, scale = SCHEMES[weight.scheme], parts.get("scale")
    if scale is None:
        return scheme.dequantize({"weight": values})
    if scale.dim() and scale.shape[0] > 1:
        scale = take(scale, rows.long() // scheme.row_block)
    if scheme.row_block > 1:
        return _scaled(values, _wide_columns(scale_values(scale), values.shape[-1]))
    others = {name: take(part, rows) for name, part in parts.items() if name not in ("weight", "scale")}
    return scheme.dequantize({"weight": values, "scale": scale, **others})


def quantize_rows(x: Tensor, form: str) -> Quantized:
    """Rows [T, K] in the activation format "int8_row", "int8_block32", "fp8_row" or "fp8_block128"."""
    if form == "int8_row":
        return int8_row(x)
    if form == "int8_block32":
        return int8_block32(x)
    if form == "fp8_row":
        q, scale = quantize_fp8_channel(x)
        return Quantized(q=q, scale=scale, format=form)
    assert form == "fp8_block128", f"no activation format {form!r}"
    columns = x.shape[-1]
    tiles = torch.nn.functional.pad(x.to(torch.float32), (0, -columns % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
    scale = tiles.abs().amax(-1) / _FP8_MAX
    return Quantized(q=_round_fp8(x, _wide_columns(scale, columns)), scale=scale, format=form)


def int8_row(x: Tensor) -> Quantized:
    """Rows [T, K] in int8 ("int8_row"): scale is a row's largest magnitude / 127, values round half to even."""
    q, scale = quantize_int8(x)
    return Quantized(q=q, scale=scale, format="int8_row")


def int8_block32(x: Tensor) -> Quantized:
    """Rows [T, K], K in whole blocks of 32, in int8 ("int8_block32"): scale [T, K / 32] is a block's absmax / 127."""
    assert x.shape[-1] % 32 == 0, f"rows of {x.shape[-1]} are not whole blocks of 32"
    q, scale = quantize_int8(x.unflatten(-1, (-1, 32)))
    return Quantized(q=q.flatten(-2), scale=scale.squeeze(-1), format="int8_block32")


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scheme int8 of [..., N, K]: (weight int8, scale float32 [..., N, 1])."""
    values = weight.to(torch.float32)
    scale = values.abs().amax(-1, keepdim=True) / 127.0
    return (values / scale.clamp(min=_TINY)).round().clamp(-127, 127).to(torch.int8), scale


def quantize_fp8_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scheme fp8_tensor of [..., N, K]: (weight float8, scale float32 [..., 1, 1])."""
    return _to_fp8(weight, weight.to(torch.float32).abs().amax((-2, -1), keepdim=True))


def quantize_fp8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scheme fp8_channel of [..., N, K]: (weight float8, scale float32 [..., N, 1])."""
    return _to_fp8(weight, weight.to(torch.float32).abs().amax(-1, keepdim=True))


def quantize_fp8_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scheme fp8_block of [..., N, K]: (weight float8, scale float32 [..., ceil(N / 128), ceil(K / 128)])."""
    rows, columns = weight.shape[-2:]
    pad = (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK)
    tiles = torch.nn.functional.pad(weight.to(torch.float32), pad).unflatten(-1, (-1, FP8_BLOCK))
    largest = tiles.unflatten(-3, (-1, FP8_BLOCK)).abs().amax((-3, -1))
    scale = largest / _FP8_MAX
    wide = _wide_columns(_wide_rows(scale, rows), columns)
    return _round_fp8(weight, wide), scale


def quantize_int4_group(weight: Tensor, group: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Scheme int4_group of [..., N, K]: (weight uint8, scale float32, zero uint8); the range of a group holds 0.

    Args:
        weight: K is a multiple of `group`.
        group: One of `INT4_GROUPS`.
    """
    assert group in INT4_GROUPS and weight.shape[-1] % group == 0, f"{weight.shape[-1]} columns in groups of {group}"
    values = weight.to(torch.float32).unflatten(-1, (-1, group))
    low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    scale = (high - low) / 15.0
    step = scale.clamp(min=_TINY)
    zero = (-low / step).round().clamp(0, 15)
    codes = ((values / step.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, 15).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, zero.to(torch.uint8)


def _to_fp8(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    scale = largest / _FP8_MAX
    return _round_fp8(weight, scale), scale


def _round_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.to(torch.float32) / scale.clamp(min=_TINY)).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)


def _wide_rows(scale: Tensor, rows: int) -> Tensor:
    return scale.repeat_interleave(FP8_BLOCK, dim=-2)[..., :rows, :]


def _wide_columns(scale: Tensor, columns: int) -> Tensor:
    return scale.repeat_interleave(FP8_BLOCK, dim=-1)[..., :columns]


def _dense(parts: Mapping[str, Tensor]) -> Tensor:
    return parts["weight"].to(torch.float32)


def _scaled(values: Tensor, scale: Tensor) -> Tensor:
    return values.to(torch.float32, copy=True).mul_(scale)


def _scaled_rows(parts: Mapping[str, Tensor]) -> Tensor:
    return _scaled(parts["weight"], scale_values(parts["scale"]))


def _scaled_blocks(parts: Mapping[str, Tensor]) -> Tensor:
    out = parts["weight"].to(torch.float32, copy=True)
    columns = _wide_columns(scale_values(parts["scale"]), out.shape[-1])
    for index in range(columns.shape[-2]):
        out[..., index * FP8_BLOCK : (index + 1) * FP8_BLOCK, :].mul_(columns[..., index : index + 1, :])
    return out


def _int4_groups(parts: Mapping[str, Tensor]) -> Tensor:
    packed, scale = parts["weight"], parts["scale"].to(torch.float32)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).unflatten(-1, (scale.shape[-1], -1))
    centred: Tensor = codes.to(torch.float32).sub_(parts["zero"].to(torch.float32).unsqueeze(-1))
    return centred.mul_(scale.unsqueeze(-1)).flatten(-2)


def _unpacked(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """All blocks of a GGUF weight, a slice at a time."""
    elements, num_bytes, unpack = GGUF_BLOCKS[name]
    weight = parts["weight"]
    per_row = weight.shape[-1] // num_bytes
    blocks = weight.reshape(-1, num_bytes)
    out = torch.empty(len(blocks), elements, dtype=torch.float32, device=weight.device)
    step = _CHUNK_ELEMENTS // elements
    for begin in range(0, len(blocks), step):
        out[begin : begin + step] = unpack(blocks[begin : begin + step])
    return out.view(*weight.shape[:-1], per_row * elements)


def _register_all() -> None:
    scaled = ("weight", "scale")
    register_scheme(Scheme(name="none", parts=("weight",), block=1, dequantize=_dense, bits=16.0))
    for name in ("int8", "fp8_tensor", "fp8_channel"):
        register_scheme(Scheme(name=name, parts=scaled, block=0, dequantize=_scaled_rows, bits=8.0))
    block = Scheme(
        name="fp8_block", parts=scaled, block=FP8_BLOCK, row_block=FP8_BLOCK, dequantize=_scaled_blocks, bits=8.002
    )
    register_scheme(block)
    # A cut at the largest group is one at every group.
    int4 = Scheme(
        name="int4_group", parts=(*scaled, "zero"), block=max(INT4_GROUPS), dequantize=_int4_groups, bits=4.3125
    )
    register_scheme(int4)
    for name, (elements, num_bytes, _) in GGUF_BLOCKS.items():
        bits = num_bytes * 8 / elements
        unpack = partial(_unpacked, name)
        register_scheme(Scheme(name=name, parts=("weight",), block=elements, dequantize=unpack, bits=bits))


_register_all()
