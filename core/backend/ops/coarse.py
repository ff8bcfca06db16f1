"""Coarse operations: models call these; binding picks a vendor's fused kernel or the declared decomposition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from core.backend.batch import Plan
from core.backend.comm import Communicator
from core.backend.ops.cache import LayerCache
from core.backend.ops.spec import Args, OpSpec, optional
from core.backend.weights import Packed
from core.spec import DType

__all__ = [
    "MlaPrologArgs",
    "MlaPrologOp",
    "QkNormRopeWriteArgs",
    "QkNormRopeWriteOp",
    "ReduceNormArgs",
    "ReduceNormOp",
]


@dataclass(slots=True, kw_only=True)
class ReduceNormArgs(Args):
    """Run-time tensors of `reduce_norm`.

    Args:
        partial: [T, dim], model dtype: this rank's part of a row-parallel product; may be overwritten.
        weight: [dim], model dtype or float32.
        residual: [T, dim], model dtype; may be overwritten.
        comm: The tensor-parallel ranks; read only where `world` > 1.
        post_weight: [dim], as weight: norm of the reduced sum before it joins the residual.
    """

    partial: Tensor
    weight: Tensor
    residual: Tensor
    comm: Communicator | None = None
    post_weight: Tensor | None = optional("post_norm")


@dataclass(frozen=True, kw_only=True)
class ReduceNormOp(OpSpec):
    """Sums `partial` over the ranks, norms it where "post_norm", adds the residual, and norms the sum.

    Args:
        out_formats: Quantized formats that the consumers ask for; empty for plain tensors.
        scatter: Whether each rank keeps only its share of the rows.

    Returns:
        (y [T, dim] as an `Act`, residual [T, dim]), model dtype.
    """

    name: ClassVar[str] = "reduce_norm"
    args: ClassVar[type[Args]] = ReduceNormArgs
    dim: int
    eps: float
    weight_offset: float = 0.0
    world: int = 1
    scatter: bool = False
    out_formats: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class QkNormRopeWriteArgs(Args):
    """Run-time tensors of `qk_norm_rope_write`.

    Args:
        query: [T, num_heads, head_dim], model dtype, any stride in the first two dims; may be overwritten.
        key: [T, num_kv_heads, head_dim], as query.
        value: [T, num_kv_heads, v_head_dim], as query, read-only.
        positions: [T], int32, device.
        cos_sin: As in `RopeArgs`.
        cache: The layer's planes; written.
        plan: Where each token goes.
        q_weight: [head_dim]: norm of each query head.
        k_weight: [head_dim]: norm of each key head.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor
    cos_sin: Tensor
    cache: LayerCache
    plan: Plan
    q_weight: Tensor | None = optional("qk_norm")
    k_weight: Tensor | None = optional("qk_norm")


@dataclass(frozen=True, kw_only=True)
class QkNormRopeWriteOp(OpSpec):
    """Norms query and key heads where "qk_norm", rotates them, and writes key and value to the cache.

    Returns:
        (query, key), normed and rotated. They may be the inputs, overwritten.
    """

    name: ClassVar[str] = "qk_norm_rope_write"
    args: ClassVar[type[Args]] = QkNormRopeWriteArgs
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    kv_dtype: DType
    interleaved: bool = False
    eps: float = 1e-6
    weight_offset: float = 0.0


@dataclass(slots=True, kw_only=True)
class MlaPrologArgs(Args):
    """Run-time tensors of `mla_prolog`.

    Args:
        q: [T, num_heads, nope_dim + rope_dim], model dtype; may be overwritten.
        kv: [T, latent_dim + rope_dim], model dtype: compressed latent, then the key's rope part; may be overwritten.
        kv_weight: [latent_dim]: norm of the latent.
        k_up: Packed, role "experts", logical shape [num_heads, latent_dim, nope_dim]: key up-projection to absorb.
        positions: [T], int32.
        cos_sin: As in `RopeArgs`.
        cache: One plane "latent"; written.
        plan: Where each token goes.
    """

    q: Tensor
    kv: Tensor
    kv_weight: Tensor
    k_up: Packed
    positions: Tensor
    cos_sin: Tensor
    cache: LayerCache
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class MlaPrologOp(OpSpec):
    """What comes before `mla`: norm of the latent, rope, absorption of the key up-projection, and the cache write.

    Returns:
        (q_latent [T, num_heads, latent_dim], q_rope [T, num_heads, rope_dim]), model dtype.
    """

    name: ClassVar[str] = "mla_prolog"
    args: ClassVar[type[Args]] = MlaPrologArgs
    num_heads: int
    nope_dim: int
    latent_dim: int
    rope_dim: int
    kv_dtype: DType
    eps: float
    interleaved: bool = True
