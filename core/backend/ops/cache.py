"""Operations that write and read the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from core.backend.batch import Plan
from core.backend.ops.spec import Args, OpSpec, optional
from core.spec import CacheKind, DType, KVCacheSpec

__all__ = ["AttentionArgs", "AttentionOp", "KvWriteArgs", "KvWriteOp", "LayerCache"]

LayerCache = tuple[Tensor, ...]
"""One layer's cache: a tensor for each plane of the group's `KVLayout`, as `KVLayout.views` gives them."""


@dataclass(slots=True, kw_only=True)
class KvWriteArgs(Args):
    """Run-time tensors of `kv_write`.

    Args:
        key: [T, num_kv_heads, head_dim], model dtype, any stride in the first two dims, read-only.
        value: [T, num_kv_heads, v_head_dim], as key; None where `v_head_dim` is 0.
        cache: The layer's planes; written.
        plan: `plan.slots` says where each token goes; -1 is written nowhere.
        k_scale: [1] or [num_kv_heads], float32: stored key = key / k_scale.
        v_scale: As k_scale, for values.
    """

    key: Tensor
    value: Tensor | None
    cache: LayerCache
    plan: Plan
    k_scale: Tensor | None = optional("scales")
    v_scale: Tensor | None = optional("scales")


@dataclass(frozen=True, kw_only=True)
class KvWriteOp(OpSpec):
    """Stores keys and values of the step's tokens into their slots. Returns None.

    Several tokens never share a slot. Slots not named are left as they are.
    """

    name: ClassVar[str] = "kv_write"
    args: ClassVar[type[Args]] = KvWriteArgs
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_dtype: DType


@dataclass(slots=True, kw_only=True)
class AttentionArgs(Args):
    """Run-time tensors of `attention`.

    Args:
        query: [T, num_heads, head_dim], model dtype, contiguous in the last dim, read-only.
        cache: The layer's planes, holding every key of the step already; None in ragged mode.
        plan: Lengths, block tables and offsets of the group.
        key: [T, num_kv_heads, head_dim]: the step's fresh keys. A hint beside a cache (what was cached defines the
            result, else a quantized cache answers differently on a prefix hit); the keys themselves in ragged mode.
        value: [T, num_kv_heads, v_head_dim], as key.
        k_scale: As in `KvWriteArgs`: key = stored key * k_scale.
        v_scale: As k_scale, for values.
        sinks: [num_heads], float32: a logit for each head that joins the softmax's denominator and has no value.
        lse: [T, num_heads], float32, written: natural log of the sum of exponentials, sinks included.
    """

    query: Tensor
    cache: LayerCache | None
    plan: Plan
    key: Tensor | None = None
    value: Tensor | None = None
    k_scale: Tensor | None = optional("scales")
    v_scale: Tensor | None = optional("scales")
    sinks: Tensor | None = optional("sinks")
    lse: Tensor | None = optional("lse")


@dataclass(frozen=True, kw_only=True)
class AttentionOp(OpSpec):
    """Scaled dot-product attention, one entry for prefill, chunk, decode and mixed batches.

    Request r has `query_len` tokens in the step and `seq_len` keys; its i-th query stands at position
    seq_len - query_len + i and sees the keys of positions (p - window, p] (window 0: all up to p; not causal: all).
    Query head h reads key head h // (num_heads // num_kv_heads). Logits are scale * q.k, then softcap *
    tanh(logits / softcap) where softcap > 0. Softmax in float32. Features: "sinks", "lse", "scales", and "ragged"
    (no cache; keys are the step's own).

    Args:
        quantize_activations: Whether a kernel may round queries, keys, probabilities and values, to the format that its
            Verdict declares (`activation_format`). Logits, the softmax and its denominator stay in float32.

    Returns:
        [T, num_heads, v_head_dim], model dtype. Rows of padding tokens are finite but otherwise unspecified.
    """

    name: ClassVar[str] = "attention"
    args: ClassVar[type[Args]] = AttentionArgs
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_dtype: DType
    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    quantize_activations: bool = False

    @property
    def cache_spec(self) -> KVCacheSpec:
        """The cache that this operation reads."""
        return KVCacheSpec(
            kind=CacheKind.SLIDING if self.window else CacheKind.FULL,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            dtype=self.kv_dtype,
            window=self.window,
        )
