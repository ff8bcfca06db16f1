"""Operations of whole model families: latent attention, sparse indexing, and the recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from core.backend.batch import Plan
from core.backend.ops.cache import LayerCache
from core.backend.ops.spec import Args, OpSpec, optional
from core.spec import DType

__all__ = [
    "Conv1dArgs",
    "Conv1dOp",
    "GatedDeltaArgs",
    "GatedDeltaOp",
    "IndexTopkArgs",
    "IndexTopkOp",
    "MergeLseArgs",
    "MergeLseOp",
    "MlaArgs",
    "MlaOp",
    "SsdArgs",
    "SsdOp",
]


@dataclass(slots=True, kw_only=True)
class MlaArgs(Args):
    """Run-time tensors of `mla`.

    Args:
        q_latent: [T, num_heads, latent_dim], model dtype: queries with the key up-projection absorbed.
        q_rope: [T, num_heads, rope_dim], model dtype, rotated.
        cache: One plane "latent": latent_dim elements, then rope_dim elements of the rotated key.
        plan: Lengths and tables of the group.
        indices: [T, top_k], int32: positions that each query may see, -1 for none; the result of `index_topk`.
        lse: [T, num_heads], float32, written.
    """

    q_latent: Tensor
    q_rope: Tensor
    cache: LayerCache
    plan: Plan
    indices: Tensor | None = optional("sparse")
    lse: Tensor | None = optional("lse")


@dataclass(frozen=True, kw_only=True)
class MlaOp(OpSpec):
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024): one latent key and value for all heads.

    Logits are scale * (q_latent . latent + q_rope . rope key), causal; values are the latents.

    Returns:
        [T, num_heads, latent_dim], model dtype.
    """

    name: ClassVar[str] = "mla"
    args: ClassVar[type[Args]] = MlaArgs
    num_heads: int
    latent_dim: int
    rope_dim: int
    kv_dtype: DType
    scale: float


@dataclass(slots=True, kw_only=True)
class IndexTopkArgs(Args):
    """Run-time tensors of `index_topk`.

    Args:
        query: [T, num_heads, head_dim], model dtype.
        weights: [T, num_heads], float32.
        cache: One plane "latent" of [block_size, 1, head_dim]: the index keys.
        plan: Lengths and tables of the group.
    """

    query: Tensor
    weights: Tensor
    cache: LayerCache
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class IndexTopkOp(OpSpec):
    """Chooses the positions that sparse attention reads (DeepSeek-V3.2, 2025).

    score(t, s) = sum over heads of weights[t, h] * relu(query[t, h] . key[s]) over the causal positions s; the `top_k`
    largest stay (ties: lower position first).

    Returns:
        [T, top_k], int32, in falling order of score; -1 where there are fewer keys.
    """

    name: ClassVar[str] = "index_topk"
    args: ClassVar[type[Args]] = IndexTopkArgs
    num_heads: int
    head_dim: int
    top_k: int
    kv_dtype: DType


@dataclass(slots=True, kw_only=True)
class Conv1dArgs(Args):
    """Run-time tensors of `conv1d`.

    Args:
        x: [T, channels], model dtype.
        weight: [channels, width], model dtype.
        cache: One plane of [width - 1, channels]: the inputs before the next token, oldest first.
        plan: `state_slots`, `num_accepted` and `checkpoint_slots` of the group.
        bias: [channels], model dtype.
    """

    x: Tensor
    weight: Tensor
    cache: LayerCache
    plan: Plan
    bias: Tensor | None = optional("bias")


@dataclass(frozen=True, kw_only=True)
class Conv1dOp(OpSpec):
    """Causal depthwise convolution over each request's tokens, with its last inputs kept as state.

    Request r starts from the state in slot state_slots[r, num_accepted[r] - 1] (zeros where num_accepted is 0). After
    its token i of a decode query the state goes to slot state_slots[r, i]; a longer query writes only its end state,
    to state_slots[r, 0]. The end state also goes to checkpoint_slots[r] where that is not -1.

    Returns:
        [T, channels], model dtype: activation(conv + bias).
    """

    name: ClassVar[str] = "conv1d"
    args: ClassVar[type[Args]] = Conv1dArgs
    channels: int
    width: int
    activation: Literal["silu", "none"] = "silu"


@dataclass(slots=True, kw_only=True)
class GatedDeltaArgs(Args):
    """Run-time tensors of `gated_delta`.

    Args:
        query: [T, num_k_heads, k_dim], model dtype.
        key: [T, num_k_heads, k_dim], model dtype.
        value: [T, num_v_heads, v_dim], model dtype.
        gate: [T, num_v_heads], float32: log of the decay, at most 0.
        beta: [T, num_v_heads], float32, in [0, 1].
        cache: One plane of [num_v_heads, k_dim, v_dim]: the state.
        plan: As for `conv1d`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    cache: LayerCache
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class GatedDeltaOp(OpSpec):
    """Gated delta rule (Yang et al., 2024): S = exp(gate) * S; S = S + k (beta * (v - S^T k))^T; out = S^T (scale * q).

    Value head h uses key head h // (num_v_heads // num_k_heads). Queries and keys are L2-normalised first where
    `qk_l2norm` (x / sqrt(sum x^2 + 1e-6)). States are read and written as in `conv1d`; all in float32.

    Returns:
        [T, num_v_heads, v_dim], model dtype.
    """

    name: ClassVar[str] = "gated_delta"
    args: ClassVar[type[Args]] = GatedDeltaArgs
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    scale: float
    qk_l2norm: bool = True


@dataclass(slots=True, kw_only=True)
class SsdArgs(Args):
    """Run-time tensors of `ssd`.

    Args:
        x: [T, num_heads, head_dim], model dtype.
        dt: [T, num_heads], float32, before bias and softplus.
        a: [num_heads], float32, negative.
        b: [T, num_groups, state_dim], model dtype.
        c: [T, num_groups, state_dim], model dtype.
        d: [num_heads], float32.
        dt_bias: [num_heads], float32.
        cache: One plane of [num_heads, head_dim, state_dim]: the state.
        plan: As for `conv1d`.
    """

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    dt_bias: Tensor
    cache: LayerCache
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class SsdOp(OpSpec):
    """State-space duality of Mamba-2 (Dao and Gu, 2024): s = softplus(dt + dt_bias), clamped to [dt_min, dt_max];
    S = exp(s * a) * S + s * x b^T; out = S c + d * x.

    Head h uses group h // (num_heads // num_groups). States are read and written as in `conv1d`; all in float32.

    Returns:
        [T, num_heads, head_dim], model dtype.
    """

    name: ClassVar[str] = "ssd"
    args: ClassVar[type[Args]] = SsdArgs
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    dt_min: float = 0.0
    dt_max: float = float("inf")


@dataclass(slots=True, kw_only=True)
class MergeLseArgs(Args):
    """Run-time tensors of `merge_lse`.

    Args:
        outs: [N, T, num_heads, v_head_dim], model dtype or float32.
        lses: [N, T, num_heads], float32; -inf where a part saw no key.
    """

    outs: Tensor
    lses: Tensor


@dataclass(frozen=True, kw_only=True)
class MergeLseOp(OpSpec):
    """Joins attention over N disjoint sets of keys into attention over all of them.

    Returns:
        (out [T, num_heads, v_head_dim], model dtype; lse [T, num_heads], float32); zero and -inf without keys.
    """

    name: ClassVar[str] = "merge_lse"
    args: ClassVar[type[Args]] = MergeLseArgs
    num_heads: int
    v_head_dim: int
