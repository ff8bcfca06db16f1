"""Reference of the dense operations outside the cache: embedding, matrix products, norms, activations, rope."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from core.backend.layout import torch_dtype
from core.backend.ops.dense import (
    Act,
    Activation,
    ActMulArgs,
    ActMulOp,
    EmbedArgs,
    EmbedOp,
    LinearArgs,
    LinearOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
)
from core.backend.ops.spec import OpSpec
from core.backend.reference.precision import row_by_row, wide
from core.backend.reference.registry import composite
from core.backend.schemes import dense_rows, int8_row
from core.backend.weights import Packed, Quantized

__all__ = ["activate", "int8_product", "plain", "product", "rms_norm", "rotate"]

_EXACT_INT8_TERMS = 1024
"""Most products of two int8 (at most 2^14 each) whose sum float32 holds exactly: 2^14 * 2^10 = 2^24."""


def plain(x: Act, dtype: torch.dtype) -> Tensor:
    """The values of an activation in `dtype`, whatever format it came in."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    scale = x.scale.to(dtype)
    if x.format == "fp8_block128":
        scale = scale.repeat_interleave(128, dim=-1)[:, : x.q.shape[-1]]
    return x.q.to(dtype) * scale


@composite("embed")
def make_embed(op: EmbedOp) -> Callable[[EmbedArgs], Tensor]:
    """Rows of the table, times the rounded multiplier; only the gathered rows are dequantized."""
    dtype, acc = torch_dtype(op.dtype), wide(op)
    multiplier = torch.tensor(op.multiplier, dtype=dtype).item()

    def embed(args: EmbedArgs) -> Tensor:
        rows = dense_rows(args.weight, args.token_ids)
        return (rows.to(acc) * multiplier).to(dtype)

    return embed


@composite("linear")
def make_linear(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    """x @ weight.T + bias; int8 weights multiply activations that are quantized row by row."""
    acc, out_dtype = wide(op), torch_dtype(op.out_dtype)

    def linear(args: LinearArgs) -> Tensor:
        if op.scheme == "int8":
            y = int8_product(op, args.x, args.weight)
        else:
            y = product(op, plain(args.x, acc), args.weight.dense().to(acc))
        if args.bias is not None:
            y = y + args.bias.to(acc)
        return y.to(out_dtype)

    return linear


def product(op: OpSpec, x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T."""
    return row_by_row(op, lambda rows: F.linear(rows, weight), x)


def int8_product(op: OpSpec, x: Act, weight: Packed) -> Tensor:
    """The integer product of int8 rows with an int8 weight, exact, times both scales.

    A private form shows no integers: its dense values multiply the same rounded rows.
    """
    rows, acc = x if isinstance(x, Quantized) else int8_row(x), wide(op)
    if weight.scheme != "int8" or type(weight).dense is not Packed.dense:
        return product(op, plain(rows, acc), weight.dense().to(acc))
    parts = weight.tensors()
    total = torch.zeros(rows.q.shape[0], weight.shape[0], dtype=torch.int32, device=rows.q.device)
    for start in range(0, rows.q.shape[1], _EXACT_INT8_TERMS):
        columns = slice(start, start + _EXACT_INT8_TERMS)
        total += F.linear(rows.q[:, columns].float(), parts["weight"][:, columns].float()).to(torch.int32)
    return total.to(acc) * rows.scale.to(acc) * parts["scale"].to(acc).view(1, -1)


@composite("rms_norm")
def make_rms_norm(op: RmsNormOp) -> Callable[[RmsNormArgs], Tensor | tuple[Tensor, Tensor]]:
    """The norm of x, or of the rounded sum x + residual, which is returned with it."""

    def run(args: RmsNormArgs) -> Tensor | tuple[Tensor, Tensor]:
        if args.residual is None:
            return rms_norm(op, args.x, args.weight)
        total = (args.x.to(wide(op)) + args.residual.to(wide(op))).to(args.x.dtype)
        return rms_norm(op, total, args.weight), total

    return run


def rms_norm(op: RmsNormOp, x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dim, rounded once."""
    acc = wide(op)
    values = x.to(acc)
    mean = row_by_row(op, lambda rows: rows.square().mean(-1, keepdim=True), values)
    normed = values * torch.rsqrt(mean + op.eps)
    return (normed * (weight.to(acc) + op.weight_offset)).to(torch_dtype(op.dtype))


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation function of that name."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


@composite("act_mul")
def make_act_mul(op: ActMulOp) -> Callable[[ActMulArgs], Tensor]:
    """activation(first half) * second half."""

    def act_mul(args: ActMulArgs) -> Tensor:
        x = args.x.to(wide(op))
        gate = row_by_row(op, lambda rows: activate(rows, op.activation), x[:, : op.size])
        return (gate * x[:, op.size :]).to(torch_dtype(op.dtype))

    return act_mul


def rotate(x: Tensor, angles: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """Rotates pairs of the first `rotary_dim` elements of the last dim.

    Args:
        x: [T, heads, dim].
        angles: [T, rotary_dim], cosines then sines, in the type to compute in.
    """
    cos, sin = angles[:, None].chunk(2, dim=-1)
    turned = x[..., :rotary_dim].to(angles.dtype)
    if interleaved:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)


@composite("rope")
def make_rope(op: RopeOp) -> Callable[[RopeArgs], tuple[Tensor, Tensor]]:
    """Query and key, rotated by the angles of their positions; the inputs stay as they are."""

    def rope(args: RopeArgs) -> tuple[Tensor, Tensor]:
        angles = args.cos_sin.index_select(0, args.positions.long()).to(wide(op))
        query = rotate(args.query, angles, op.rotary_dim, op.interleaved)
        return query, rotate(args.key, angles, op.rotary_dim, op.interleaved)

    return rope
