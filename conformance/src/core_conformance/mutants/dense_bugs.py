"""Embedding, products, norms, activations and rope with one bug each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed, torch_dtype
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    EmbedArgs,
    EmbedOp,
    LinearArgs,
    LinearOp,
    ReduceNormArgs,
    ReduceNormOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
)
from core.spec import DType
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.planting import after, before, changed_op
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS"]


# -- products ----------------------------------------------------------------------------------------------------------


def _drops_tail(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    """Sums over whole groups of 32 columns and forgets the rest."""
    honest = oracle(op)
    whole = op.in_features // 32 * 32

    def linear(args: LinearArgs) -> Tensor:
        if op.scheme != "none" or whole in (0, op.in_features) or not isinstance(args.x, Tensor):
            out: Tensor = honest(args)
            return out
        weight = args.weight.tensors()["weight"][:, :whole]
        packed = Packed(shape=weight.shape, scheme="none", tensors={"weight": weight})
        short: Tensor = honest(dataclasses.replace(args, x=args.x[:, :whole], weight=packed))
        return short

    return linear


def _bias_after_rounding(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    plain = oracle(dataclasses.replace(op, features=op.features - {"bias"}))

    def linear(args: LinearArgs) -> Tensor:
        out: Tensor = plain(dataclasses.replace(args, bias=None))
        return out if args.bias is None else out + args.bias.to(out.dtype)

    return linear


def _half_before_float32(op: LinearOp, args: LinearArgs, out: Tensor) -> Tensor:
    """The result is rounded to the activations' type on its way to float32."""
    return out.to(torch_dtype(op.dtype)).to(out.dtype)


def _sums_in_half(op: LinearOp, args: LinearArgs, out: Tensor) -> Tensor:
    """Sums of 64 products at a time are kept in the model's type."""
    if not isinstance(args.x, Tensor) or op.scheme != "none" or op.dtype is DType.FLOAT32:
        return out
    dtype, weight = torch_dtype(op.dtype), args.weight.tensors()["weight"]
    total = torch.zeros(len(args.x), len(weight), dtype=dtype)
    for x, w in zip(args.x.split(64, dim=1), weight.split(64, dim=1), strict=True):
        total += (x.float() @ w.float().T).to(dtype)
    return (total + (0 if args.bias is None else args.bias)).to(out.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    """The rows as if nothing lay between them."""
    if x.is_contiguous() or x.dim() < 2:
        return x
    strides = [1]
    for size in reversed(x.shape[1:]):
        strides.insert(0, strides[0] * size)
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


def _x_without_stride(op: Any, args: Any) -> Any:
    return dataclasses.replace(args, x=_dense_rows(args.x)) if isinstance(args.x, Tensor) else args


def _first_weight_kept(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    """The weight is brought into the kernel's form at its first call, and never again."""
    honest = oracle(op)
    kept: dict[int, Packed] = {}

    def linear(args: LinearArgs) -> Tensor:
        if args.weight.scheme != "none":
            out: Tensor = honest(args)
            return out
        key = args.weight.tensors()["weight"].data_ptr()
        if key not in kept:
            tensors = {name: part.clone() for name, part in args.weight.tensors().items()}
            kept[key] = Packed(shape=args.weight.shape, scheme="none", tensors=tensors)
        stale: Tensor = honest(dataclasses.replace(args, weight=kept[key]))
        return stale

    return linear


# -- embedding ---------------------------------------------------------------------------------------------------------


def _multiplier_unrounded(op: EmbedOp, args: EmbedArgs, out: Tensor) -> Tensor:
    if op.multiplier == 1.0:
        return out
    plain: Tensor = oracle(dataclasses.replace(op, multiplier=1.0))(args)
    return (plain.double() * op.multiplier).to(out.dtype)


def _last_row_out_of_reach(op: EmbedOp, args: EmbedArgs) -> EmbedArgs:
    return dataclasses.replace(args, token_ids=args.token_ids.clamp(max=args.weight.shape[0] - 2))


# -- norms -------------------------------------------------------------------------------------------------------------


def _norm_of_x_alone(op: RmsNormOp, args: RmsNormArgs, out: Any) -> Any:
    """With a residual the norm is that of x; the sum is right."""
    if args.residual is None:
        return out
    alone = oracle(dataclasses.replace(op, features=frozenset()))(RmsNormArgs(x=args.x, weight=args.weight))
    return alone, out[1]


def _residual_returned_as_it_was(op: RmsNormOp, args: RmsNormArgs, out: Any) -> Any:
    return out if args.residual is None else (out[0], args.residual)


def _post_norm_behind_the_sum(op: ReduceNormOp, args: ReduceNormArgs, out: Any) -> Any:
    """The residual joins first, and the post norm takes both."""
    if args.post_weight is None:
        return out
    norm = oracle(RmsNormOp(dtype=op.dtype, dim=op.dim, eps=op.eps, weight_offset=op.weight_offset))
    total = norm(RmsNormArgs(x=args.partial + args.residual, weight=args.post_weight))
    return norm(RmsNormArgs(x=total, weight=args.weight)), total


# -- activations and rope ----------------------------------------------------------------------------------------------


def _halves_exchanged(op: ActMulOp, args: ActMulArgs) -> ActMulArgs:
    return dataclasses.replace(args, x=torch.cat((args.x[:, op.size :], args.x[:, : op.size]), dim=1))


def _other_gelu(op: ActMulOp) -> str:
    return {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(op.activation, op.activation)


def _silu_overflows(op: ActMulOp, args: ActMulArgs, out: Tensor) -> Tensor:
    """x * exp(x) / (1 + exp(x)), which is NaN for large x."""
    if op.activation != "silu":
        return out
    gate, up = args.x[:, : op.size].float(), args.x[:, op.size :].float()
    power = torch.exp(gate.to(torch.float16)).float()
    return (gate * power / (1 + power) * up).to(out.dtype)


def _rope_off_by_one(op: RopeOp, args: RopeArgs) -> RopeArgs:
    return dataclasses.replace(args, positions=(args.positions + 1).clamp(max=len(args.cos_sin) - 1))


def _key_not_rotated(op: RopeOp, args: RopeArgs, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[0], args.key.clone()


def _whole_head_rotated(op: RopeOp) -> Callable[[RopeArgs], tuple[Tensor, Tensor]]:
    """Pairs lie half a head apart, also where less than the head is rotated."""
    honest = oracle(op)
    if op.rotary_dim == op.head_dim or op.interleaved:
        return honest

    def shuffled(x: Tensor, back: bool) -> Tensor:
        half, rest = op.rotary_dim // 2, (op.head_dim - op.rotary_dim) // 2
        sizes = (half, rest, half, rest) if not back else (half, half, rest, rest)
        a, b, c, d = x.split(sizes, dim=-1)
        return torch.cat((a, c, b, d), dim=-1)

    def rope(args: RopeArgs) -> tuple[Tensor, Tensor]:
        query, key = honest(dataclasses.replace(args, query=shuffled(args.query, False), key=shuffled(args.key, False)))
        return shuffled(query, True), shuffled(key, True)

    return rope


def _angles_in_half(op: RopeOp, args: RopeArgs) -> RopeArgs:
    return dataclasses.replace(args, cos_sin=args.cos_sin.to(torch.bfloat16).float())


def _linear(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, first, {"linear": maker})


def _norm(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, first, {"rms_norm": maker})


def _rope(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, first, {"rope": maker})


MUTANTS: tuple[Mutant, ...] = (
    _linear("K tail dropped", "linear", _drops_tail),
    _linear("bias added behind the rounding", "linear/bias", _bias_after_rounding),
    _linear("head rounded to half precision", "linear/float32-out", after(_half_before_float32)),
    _linear("sums kept in half precision", "linear/dense", after(_sums_in_half)),
    _linear("x read without its stride", "linear/strided", before(_x_without_stride)),
    _linear("weight kept from its first use", "linear/update", _first_weight_kept),
    kernel_bug("multiplier not rounded", "embed", {"embed": after(_multiplier_unrounded)}),
    kernel_bug("last row out of reach", "embed", {"embed": before(_last_row_out_of_reach)}),
    _norm("norm without eps", "rms_norm/small", changed_op(eps=lambda op: 0.0)),
    _norm("norm weight without its offset", "rms_norm", changed_op(weight_offset=lambda op: 0.0)),
    _norm("norm reads x without its stride", "rms_norm/strided", before(_x_without_stride)),
    _norm("norm of x alone", "rms_norm/residual", after(_norm_of_x_alone)),
    _norm("residual not added up", "rms_norm/residual", after(_residual_returned_as_it_was)),
    kernel_bug(
        "coarse norm without its offset", "reduce_norm", {"reduce_norm": changed_op(weight_offset=lambda op: 0.0)}
    ),
    kernel_bug("post norm behind the sum", "reduce_norm/post-norm", {"reduce_norm": after(_post_norm_behind_the_sum)}),
    kernel_bug("gate and up exchanged", "act_mul", {"act_mul": before(_halves_exchanged)}),
    kernel_bug("the other gelu", "act_mul/gelu", {"act_mul": changed_op(activation=_other_gelu)}),
    kernel_bug("silu overflows", "act_mul/silu", {"act_mul": after(_silu_overflows)}),
    _rope("rope off by one", "rope", before(_rope_off_by_one)),
    _rope("key not rotated", "rope", after(_key_not_rotated)),
    _rope("pairs taken as halves", "rope/pairs", changed_op(interleaved=lambda op: False)),
    _rope("pairs half a head apart", "rope/partial", _whole_head_rotated),
    _rope("angles in bfloat16", "rope", before(_angles_in_half)),
)
