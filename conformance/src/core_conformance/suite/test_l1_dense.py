"""L1: embedding, norms, gated activations and rope against float64."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import (
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
from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import Suspects
from core_conformance.operations.cache_memory import int32
from core_conformance.subject import Subject, oracle, wide_op
from core_conformance.tolerance import U_ACC, pointwise_bound, unit_roundoff

DTYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "fp32": DType.FLOAT32}
_SHAPES = ((1, 64), (5, 96), (3, 576), (0, 64))
"""(tokens, width); no token at all is a step too."""


def normal(dice: torch.Generator, dtype: DType, *shape: int, spread: float = 1.0) -> Tensor:
    """Normal numbers, already rounded to the type."""
    return (torch.randn(*shape, generator=dice) * spread).to(torch_dtype(dtype))


@check("L1/embed", DTYPES)
def test_embed_gathers_rows(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Bit by bit: the first row, the last, repeats, no token; and times a multiplier that was rounded first."""
    table = normal(dice, variant, 37, 48)
    for multiplier in (1.0, math.sqrt(640)):
        op = EmbedOp(dtype=variant, dim=48, multiplier=multiplier)
        embed = subject.bind(op)
        weight = subject.pack({"weight": table}, "none", table.shape, variant, role="embedding")
        factor = torch.tensor(multiplier, dtype=table.dtype).double()
        for ids in ([0, 36, 5, 5, 17], []):
            expected = (table[ids].double() * factor).to(table.dtype)
            subject.equal(op, embed(EmbedArgs(token_ids=subject.put(int32(ids)), weight=weight)), expected)


@check("L1/rms_norm", DTYPES)
def test_rms_norm(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Several widths and offsets; weights in the model's type and in float32; heads of a fused product by stride."""
    for rows, dim in _SHAPES:
        for offset, weight_dtype in ((0.0, variant), (1.0, DType.FLOAT32)):
            op = RmsNormOp(dtype=variant, dim=dim, eps=1e-5, weight_offset=offset)
            x, weight = normal(dice, variant, rows, dim, spread=3.0), normal(dice, weight_dtype, dim)
            out = subject.bind(op)(RmsNormArgs(x=subject.put(x), weight=subject.put(weight)))
            subject.agree(op, out, *norm_of(op, x, weight), suspects=norm_suspects(op, x, weight))


@check("L1/rms_norm/strided", DTYPES)
def test_rms_norm_of_heads_in_a_fused_product(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """[T, heads, dim] views of a wider tensor, as qk-norm sees them; what lies beside them is NaN."""
    op = RmsNormOp(dtype=variant, dim=32, eps=1e-6)
    fused = normal(dice, variant, 5, 2 * 32 + 40)
    fused[:, 64:] = float("nan")
    weight = normal(dice, variant, 32)
    view = subject.put(fused)[:, :64].unflatten(1, (2, 32))
    out = subject.bind(op)(RmsNormArgs(x=view, weight=subject.put(weight)))
    subject.agree(op, out, *norm_of(op, fused[:, :64].unflatten(1, (2, 32)), weight))


@check("L1/rms_norm/small", DTYPES)
def test_rms_norm_of_small_rows_is_held_up_by_eps(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Rows far below sqrt(eps), and a row of zeros, which gives zeros and no NaN."""
    op = RmsNormOp(dtype=variant, dim=64, eps=1e-3)
    x, weight = normal(dice, variant, 3, 64, spread=1e-3), normal(dice, variant, 64)
    x[1] = 0
    out = subject.bind(op)(RmsNormArgs(x=subject.put(x), weight=subject.put(weight)))
    subject.agree(op, out, *norm_of(op, x, weight), suspects=norm_suspects(op, x, weight))


@check("L1/rms_norm/residual", DTYPES)
def test_rms_norm_with_residual(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """The sum is rounded once and returned; the norm is that of the returned sum."""
    for rows, dim in _SHAPES:
        op = RmsNormOp(dtype=variant, dim=dim, eps=1e-5, features=frozenset({"residual"}))
        x, residual = normal(dice, variant, rows, dim), normal(dice, variant, rows, dim, spread=4.0)
        weight = normal(dice, variant, dim)
        put = subject.put
        y, total = subject.bind(op)(RmsNormArgs(x=put(x), weight=put(weight), residual=put(residual)))
        _check_sum(subject, op, total, x, residual)
        subject.agree(op, y, *norm_of(op, subject.get(total), weight), "norm")


@check("L1/reduce_norm", DTYPES)
def test_reduce_norm_of_one_rank(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Residual added to the partial product, then the norm; the coarse form that models call."""
    op = ReduceNormOp(dtype=variant, dim=96, eps=1e-6, weight_offset=1.0)
    x, residual = normal(dice, variant, 4, 96), normal(dice, variant, 4, 96, spread=4.0)
    weight, put = normal(dice, variant, 96), subject.put
    y, total = subject.bind(op)(ReduceNormArgs(partial=put(x), weight=put(weight), residual=put(residual)))
    _check_sum(subject, op, total, x, residual)
    norm = RmsNormOp(dtype=variant, dim=96, eps=1e-6, weight_offset=1.0)
    subject.agree(op, y, *norm_of(norm, subject.get(total), weight), "norm")


@check("L1/reduce_norm/post-norm", DTYPES)
def test_reduce_norm_with_post_norm(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """The branch is normed before it joins the residual, as Gemma does."""
    op = ReduceNormOp(dtype=variant, dim=96, eps=1e-6, weight_offset=1.0, features=frozenset({"post_norm"}))
    x, residual, put = normal(dice, variant, 4, 96), normal(dice, variant, 4, 96, spread=4.0), subject.put
    weight, post = normal(dice, variant, 96), normal(dice, variant, 96)
    args = ReduceNormArgs(partial=put(x), weight=put(weight), residual=put(residual), post_weight=put(post))
    y, total = subject.bind(op)(args)
    norm = RmsNormOp(dtype=variant, dim=96, eps=1e-6, weight_offset=1.0)
    branch, bound = norm_of(norm, x, post)
    exact = branch + residual.double()
    subject.agree(op, total, exact, bound + pointwise_bound(exact, exact.abs(), torch_dtype(variant)), "residual")
    subject.agree(op, y, *norm_of(norm, subject.get(total), weight), "norm")


@check("L1/act_mul", [f"{act}-{dtype}" for act in ("silu", "gelu", "gelu_tanh") for dtype in DTYPES])
def test_act_mul(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Gate in the first half; large arguments of both signs saturate and give no NaN."""
    activation, name = variant.rsplit("-", 1)
    dtype = DTYPES[name]
    for rows, size in _SHAPES:
        op = ActMulOp(dtype=dtype, size=size, activation=activation)  # type: ignore[arg-type]
        x = normal(dice, dtype, rows, 2 * size, spread=2.0)
        if rows:
            x[0, :4] = torch.tensor([80.0, -80.0, 0.0, -5.0]).to(x.dtype)
        out = subject.bind(op)(ActMulArgs(x=subject.put(x)))
        exact = oracle(wide_op(op))(ActMulArgs(x=x.double()))
        magnitude = x[:, :size].double().abs() * x[:, size:].double().abs()
        subject.agree(op, out, exact, pointwise_bound(exact, magnitude, x.dtype))


@check("L1/rope", [f"{form}-{dtype}" for form in ("halves", "pairs", "partial") for dtype in DTYPES])
def test_rope(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Positions out of order and repeated; query and key are views of one fused product; the rest is copied."""
    form, name = variant.split("-")
    dtype, rotary = DTYPES[name], 16 if form == "partial" else 32
    op = RopeOp(dtype=dtype, num_heads=4, num_kv_heads=2, head_dim=32, rotary_dim=rotary, interleaved=form == "pairs")
    fused, table = normal(dice, dtype, 5, 6 * 32 + 64), rope_table(64, rotary)
    positions = int32([0, 63, 7, 7, 31])
    there = subject.put(fused)
    views = [_heads(x) for x in (there, fused)]
    query, key = subject.bind(op)(
        RopeArgs(query=views[0][0], key=views[0][1], positions=subject.put(positions), cos_sin=subject.put(table))
    )
    for got, x, what in ((query, views[1][0], "query"), (key, views[1][1], "key")):
        exact, magnitude = rotated(op, x, table[positions.long()])
        bound, suspects = pointwise_bound(exact, magnitude, x.dtype, 4), _rope_suspects(op, x, table, positions)
        subject.agree(op, got, exact, bound, what, suspects=suspects)
        subject.equal(op, got[..., rotary:], x[..., rotary:].contiguous(), f"{what} past rotary_dim")


def _rope_suspects(op: RopeOp, x: Tensor, table: Tensor, positions: Tensor) -> Suspects:
    def at(shift: int) -> Tensor:
        return rotated(op, x, table[(positions.long() + shift).clamp(0, len(table) - 1)])[0]

    def suspects(got: Tensor) -> dict[str, Tensor]:
        other = dataclasses.replace(op, interleaved=not op.interleaved)
        return {
            "shift: rotated by the angle of position + 1": at(1),
            "shift: rotated by the angle of position - 1": at(-1),
            "sign: rotated the other way": rotated(op, x, _turned_back(table)[positions.long()])[0],
            "order: the wrong elements are paired": rotated(other, x, table[positions.long()])[0],
            "nothing written: it is not rotated at all": x.double(),
        }

    return suspects


def _turned_back(table: Tensor) -> Tensor:
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat((cos, -sin), dim=-1)


def _heads(fused: Tensor) -> tuple[Tensor, Tensor]:
    return fused[:, :128].unflatten(1, (4, 32)), fused[:, 128:192].unflatten(1, (2, 32))


def norm_of(op: RmsNormOp, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The exact norm and its bound: the sum of squares as a reduction, a few roundings, one to the result's type."""
    values, scale = x.double(), weight.double() + op.weight_offset
    exact = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + op.eps) * scale
    roundings = 2 * math.sqrt(op.dim) + 8
    magnitude = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + op.eps)
    magnitude = magnitude.abs() * (weight.double().abs() + abs(op.weight_offset))
    return exact, pointwise_bound(exact, magnitude, torch_dtype(op.dtype), roundings)


def norm_suspects(op: RmsNormOp, x: Tensor, weight: Tensor) -> Suspects:
    """What the usual bugs of a norm answer."""

    def suspects(got: Tensor) -> dict[str, Tensor]:
        values, scale = x.double(), weight.double() + op.weight_offset
        mean = values.square().mean(-1, keepdim=True)
        centred = values - values.mean(-1, keepdim=True)
        found = {
            "eps: it is left out": values / mean.sqrt() * scale,
            "eps: it is added outside the root": values / (mean.sqrt() + op.eps) * scale,
            "mean: the sum of squares is not divided by the width": norm_of(op, x, weight)[0] / math.sqrt(op.dim),
            "mean: it is taken off first, as LayerNorm does": centred
            * torch.rsqrt(centred.square().mean(-1, keepdim=True) + op.eps)
            * scale,
        }
        if op.weight_offset:
            found["offset: it is not added to the weight"] = values * torch.rsqrt(mean + op.eps) * weight.double()
        return found

    return suspects


def rope_table(max_position: int, rotary_dim: int) -> Tensor:
    """[max_position, rotary_dim]: cosines, then sines, float32."""
    frequencies = 100.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(max_position)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotated(op: RopeOp, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """[T, heads, dim] exact, and the sum of the absolute values of each element's two terms."""
    cos, sin = angles.double()[:, None].chunk(2, dim=-1)
    part = x[..., : op.rotary_dim].double()
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if op.interleaved else part.chunk(2, dim=-1)
    first, second = a * cos - b * sin, b * cos + a * sin
    sizes = ((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs())
    rest = x[..., op.rotary_dim :].double()
    return torch.cat((_joined(op, first, second), rest), -1), torch.cat((_joined(op, *sizes), rest.abs()), -1)


def _joined(op: RopeOp, a: Tensor, b: Tensor) -> Tensor:
    return torch.stack((a, b), -1).flatten(-2) if op.interleaved else torch.cat((a, b), -1)


def _check_sum(subject: Subject, op: RmsNormOp | ReduceNormOp, total: Tensor, x: Tensor, residual: Tensor) -> None:
    exact = x.double() + residual.double()
    bound = (1 + 2.0**-10) * unit_roundoff(x.dtype) * exact.abs() + U_ACC * exact.abs()
    subject.agree(op, total, exact, bound, "x + residual")
