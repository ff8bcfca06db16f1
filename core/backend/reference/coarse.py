"""The coarse operations as declared sums of finer ones: each part is bound natively where the backend has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend.ops.cache import KvWriteArgs, KvWriteOp
from core.backend.ops.coarse import (
    MlaPrologArgs,
    MlaPrologOp,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    ReduceNormArgs,
    ReduceNormOp,
)
from core.backend.ops.dense import Act, RmsNormArgs, RmsNormOp, RopeArgs, RopeOp
from core.backend.ops.spec import OpSpec
from core.backend.reference.precision import row_by_row, wide
from core.backend.reference.registry import composite, decomposition
from core.backend.schemes import quantize_rows

__all__ = ["absorb"]

Part = Callable[[Any], Any]


@decomposition("reduce_norm")
def reduce_norm_parts(op: ReduceNormOp) -> dict[str, OpSpec]:
    """post_norm where asked for, and the norm that adds the residual."""
    parts: dict[str, OpSpec] = {}
    if op.has("post_norm"):
        parts["post_norm"] = _norm(op, op.dim, op.eps, op.weight_offset)
    return {**parts, "norm": _norm(op, op.dim, op.eps, op.weight_offset, frozenset({"residual"}))}


@composite("reduce_norm")
def make_reduce_norm(
    op: ReduceNormOp, norm: Part, post_norm: Part | None = None
) -> Callable[[ReduceNormArgs], tuple[Act, Tensor]]:
    """Sum over the ranks, post norm, residual, norm; one quantized format where all consumers ask for the same."""

    def reduce_norm(args: ReduceNormArgs) -> tuple[Act, Tensor]:
        x, residual = _reduced(op, args)
        if post_norm is not None:
            assert args.post_weight is not None
            x = post_norm(RmsNormArgs(x=x, weight=args.post_weight))
        y, total = norm(RmsNormArgs(x=x, weight=args.weight, residual=residual))
        return (quantize_rows(y, op.out_formats[0]) if len(op.out_formats) == 1 else y), total

    return reduce_norm


def _reduced(op: ReduceNormOp, args: ReduceNormArgs) -> tuple[Tensor, Tensor]:
    """The sum over the ranks and the residual that joins it; with scatter this rank's rows of both."""
    if op.world == 1:
        return args.partial, args.residual
    assert args.comm is not None, "reduce_norm over several ranks needs a communicator"
    if not op.scatter:
        return args.comm.all_reduce_(args.partial), args.residual
    x = args.comm.reduce_scatter(args.partial)
    if len(args.residual) == len(x):
        return x, args.residual
    return x, args.residual.narrow(0, args.comm.rank * len(x), len(x))


@decomposition("qk_norm_rope_write")
def qk_norm_rope_write_parts(op: QkNormRopeWriteOp) -> dict[str, OpSpec]:
    """q_norm and k_norm where asked for, rope unless nothing is rotated, and the cache write."""
    parts: dict[str, OpSpec] = {}
    if op.has("qk_norm"):
        parts["q_norm"] = parts["k_norm"] = _norm(op, op.head_dim, op.eps, op.weight_offset)
    if op.rotary_dim:
        parts["rope"] = RopeOp(
            dtype=op.dtype,
            determinism=op.determinism,
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            rotary_dim=op.rotary_dim,
            interleaved=op.interleaved,
        )
    parts["write"] = KvWriteOp(
        dtype=op.dtype,
        determinism=op.determinism,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        v_head_dim=op.v_head_dim,
        kv_dtype=op.kv_dtype,
    )
    return parts


@composite("qk_norm_rope_write")
def make_qk_norm_rope_write(
    op: QkNormRopeWriteOp,
    write: Part,
    rope: Part | None = None,
    q_norm: Part | None = None,
    k_norm: Part | None = None,
) -> Callable[[QkNormRopeWriteArgs], tuple[Tensor, Tensor]]:
    """Head norms, rotation, cache write, in this order."""

    def qk_norm_rope_write(args: QkNormRopeWriteArgs) -> tuple[Tensor, Tensor]:
        query, key = args.query, args.key
        if q_norm is not None and k_norm is not None:
            assert args.q_weight is not None and args.k_weight is not None
            query = q_norm(RmsNormArgs(x=query, weight=args.q_weight))
            key = k_norm(RmsNormArgs(x=key, weight=args.k_weight))
        if rope is not None:
            query, key = rope(RopeArgs(query=query, key=key, positions=args.positions, cos_sin=args.cos_sin))
        write(KvWriteArgs(key=key, value=args.value, cache=args.cache, plan=args.plan))
        return query, key

    return qk_norm_rope_write


@decomposition("mla_prolog")
def mla_prolog_parts(op: MlaPrologOp) -> dict[str, OpSpec]:
    """kv_norm of the latent, rope of the query's and the key's last part, and the cache write."""
    return {
        "kv_norm": _norm(op, op.latent_dim, op.eps, 0.0),
        "rope": RopeOp(
            dtype=op.dtype,
            determinism=op.determinism,
            num_heads=op.num_heads,
            num_kv_heads=1,
            head_dim=op.rope_dim,
            rotary_dim=op.rope_dim,
            interleaved=op.interleaved,
        ),
        "write": KvWriteOp(
            dtype=op.dtype,
            determinism=op.determinism,
            num_kv_heads=1,
            head_dim=op.latent_dim + op.rope_dim,
            v_head_dim=0,
            kv_dtype=op.kv_dtype,
        ),
    }


@composite("mla_prolog")
def make_mla_prolog(
    op: MlaPrologOp, kv_norm: Part, rope: Part, write: Part
) -> Callable[[MlaPrologArgs], tuple[Tensor, Tensor]]:
    """Norm, rope, cache write of latent and rotated key, absorption of the key up-projection."""

    def mla_prolog(args: MlaPrologArgs) -> tuple[Tensor, Tensor]:
        latent, key = args.kv.split((op.latent_dim, op.rope_dim), dim=-1)
        latent = kv_norm(RmsNormArgs(x=latent, weight=args.kv_weight))
        nope, turned = args.q.split((op.nope_dim, op.rope_dim), dim=-1)
        turned, key = rope(RopeArgs(query=turned, key=key[:, None], positions=args.positions, cos_sin=args.cos_sin))
        stored = torch.cat((latent[:, None], key), dim=-1)
        write(KvWriteArgs(key=stored, value=None, cache=args.cache, plan=args.plan))
        up = args.k_up.dense().to(wide(op))
        return row_by_row(op, lambda rows: absorb(rows, up), nope.to(wide(op))).to(nope.dtype), turned

    return mla_prolog


def absorb(nope: Tensor, k_up: Tensor) -> Tensor:
    """[T, heads, latent_dim] of queries [T, heads, nope_dim] and up-projections [heads, latent_dim, nope_dim]."""
    return torch.bmm(nope.transpose(0, 1), k_up.transpose(1, 2)).transpose(0, 1)


def _norm(op: OpSpec, dim: int, eps: float, offset: float, features: frozenset[str] = frozenset()) -> RmsNormOp:
    return RmsNormOp(
        dtype=op.dtype, features=features, determinism=op.determinism, dim=dim, eps=eps, weight_offset=offset
    )
