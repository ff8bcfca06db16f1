"""Norms, gates, rope and the embedding through torch_npu."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import Packed, Quantized, torch_dtype
from core.backend.ops import (
    Act,
    Activation,
    ActMulArgs,
    ActMulOp,
    EmbedArgs,
    EmbedOp,
    ReduceNormArgs,
    ReduceNormOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
)
from core_ascend.vendor import npu

__all__ = ["act_mul", "embed", "make_gate", "make_rotation", "reduce_norm", "rms_norm", "rope"]

Norm = Callable[[Tensor, Tensor], Tensor]


def rms_norm(op: RmsNormOp) -> Callable[[RmsNormArgs], Tensor | tuple[Tensor, Tensor]]:
    """`npu_rms_norm`, `npu_add_rms_norm`, and `npu_gemma_rms_norm` for weights that start from one."""
    norm = _plain_norm(op.eps, op.weight_offset)

    def run(args: RmsNormArgs) -> Tensor | tuple[Tensor, Tensor]:
        if args.residual is None:
            return norm(args.x, args.weight)
        return _added_norm(norm, op.eps, op.weight_offset, args.x, args.residual, args.weight)

    return run


def _plain_norm(eps: float, offset: float) -> Norm:
    vendor = npu()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        # The call wants both in one type; a weight in float32 must not lose digits.
        values = x.contiguous() if x.dtype == weight.dtype else x.to(weight.dtype).contiguous()
        if offset:
            y: Tensor = vendor.npu_gemma_rms_norm(values, weight, epsilon=eps)[0]
        else:
            y = vendor.npu_rms_norm(values, weight, epsilon=eps)[0]
        return y.to(x.dtype)

    return norm


def _added_norm(
    norm: Norm, eps: float, offset: float, x: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """(norm of the sum, sum)."""
    if offset or x.dtype != weight.dtype:
        total = x + residual
        return norm(total, weight), total
    y, _, total = npu().npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, epsilon=eps)
    return y, total


def reduce_norm(op: ReduceNormOp) -> Callable[[ReduceNormArgs], tuple[Act, Tensor]]:
    """One rank: post norm, then `npu_add_rms_norm`, with the rows quantized in the same call where asked for."""
    vendor, norm = npu(), _plain_norm(op.eps, op.weight_offset)
    quantized = op.out_formats == ("int8_row",)

    def run(args: ReduceNormArgs) -> tuple[Act, Tensor]:
        x = args.partial
        if args.post_weight is not None:
            x = norm(x, args.post_weight)
        if not quantized or op.weight_offset or args.weight.dtype != x.dtype:
            y, total = _added_norm(norm, op.eps, op.weight_offset, x, args.residual, args.weight)
            return (_row_quantized(y) if quantized else y), total
        q, _, total, scale, _ = vendor.npu_add_rms_norm_dynamic_quant(
            x.contiguous(), args.residual.contiguous(), args.weight, epsilon=op.eps, output_mask=[True, False]
        )
        return Quantized(q=q, scale=scale.view(-1, 1), format="int8_row"), total

    return run


def _row_quantized(x: Tensor) -> Quantized:
    q, scale = npu().npu_dynamic_quant(x, dst_type=torch.int8)
    return Quantized(q=q, scale=scale.view(-1, 1), format="int8_row")


def act_mul(op: ActMulOp) -> Callable[[ActMulArgs], Tensor]:
    """`npu_swiglu`, or `npu_geglu` with the gate on the left."""
    gate = make_gate(op.activation)

    def run(args: ActMulArgs) -> Tensor:
        return gate(args.x)

    return run


def make_gate(activation: Activation) -> Callable[[Tensor], Tensor]:
    """activation(left half) * right half along the last dim."""
    vendor = npu()
    if activation == "silu":
        return lambda x: vendor.npu_swiglu(x, dim=-1)
    tanh = 1 if activation == "gelu_tanh" else 0
    return lambda x: vendor.npu_geglu(x, dim=-1, approximate=tanh, activate_left=True)[0]


def embed(op: EmbedOp) -> Callable[[EmbedArgs], Tensor]:
    """Rows of the dense table, times the rounded multiplier."""
    multiplier = torch.tensor(op.multiplier, dtype=torch_dtype(op.dtype)).item()

    def run(args: EmbedArgs) -> Tensor:
        rows = _table(args.weight).index_select(0, args.token_ids)
        return rows if multiplier == 1.0 else rows * multiplier

    return run


def _table(weight: Packed) -> Tensor:
    return weight.tensors()["weight"]


def rope(op: RopeOp) -> Callable[[RopeArgs], tuple[Tensor, Tensor]]:
    """`npu_rotary_mul` of queries and keys, in float32: a cosine rounded to 16 bits turns by another angle."""
    rotate = make_rotation(op.rotary_dim, op.interleaved)

    def run(args: RopeArgs) -> tuple[Tensor, Tensor]:
        query, key = rotate((args.query, args.key), args.positions, args.cos_sin)
        return query, key

    return run


def make_rotation(
    rotary_dim: int, interleaved: bool
) -> Callable[[tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor, ...]]:
    """A function that turns the first `rotary_dim` elements of the heads [T, heads, dim] of several tensors alike."""
    mode = "interleave" if interleaved else "half"
    tables: dict[int, tuple[Tensor, Tensor]] = {}

    def rotate(heads: tuple[Tensor, ...], positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, ...]:
        known = tables.get(id(cos_sin))
        if known is None or known[0] is not cos_sin:
            known = (cos_sin, _doubled(cos_sin, interleaved))
            tables[id(cos_sin)] = known
        cos, sin = known[1].index_select(0, positions).view(1, -1, 1, 2 * rotary_dim).chunk(2, dim=-1)
        return tuple(_turned(x, cos.contiguous(), sin.contiguous(), rotary_dim, mode) for x in heads)

    return rotate


def _turned(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, mode: str) -> Tensor:
    turned = npu().npu_rotary_mul(x[None, ..., :rotary_dim].float().contiguous(), cos, sin, rotary_mode=mode)[0]
    if rotary_dim == x.shape[-1]:
        out: Tensor = turned.to(x.dtype)
        return out
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def _doubled(cos_sin: Tensor, interleaved: bool) -> Tensor:
    """[positions, 2 * rotary_dim]: each angle beside both elements of its pair, cosines before sines."""
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    if interleaved:
        return torch.cat((cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)), dim=-1)
    return torch.cat((cos, cos, sin, sin), dim=-1)
