"""Self-attention over the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from core.backend.batch import Batch, Plan
from core.backend.ops import (
    Act,
    AttentionArgs,
    AttentionOp,
    LayerCache,
    OpSpec,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
)
from core.layers.context import BuildContext
from core.layers.linear import Linear, QkvLinear, QkvNames
from core.layers.parallel import HeadSplit, row_slice, split_heads
from core.layers.rotary import RotaryEmbedding
from core.layers.scheme_choice import SchemeChoice
from core.layers.weights import WeightStore, load_vector
from core.spec import KVCacheSpec

__all__ = ["Attention", "AttentionConfig"]


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Shape of an attention block, before heads are divided among ranks.

    Args:
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Heads of key and value.
        head_dim: Elements of a head.
        scale: What query times key is multiplied by.
        window: Tokens that a query sees, itself included; 0 means all.
        softcap: Bound of the logits; 0 means none.
        qkv_bias: Whether query, key and value products have biases.
        out_bias: Whether the output product has one.
        qk_norm: Whether query and key heads are normed.
        norm_eps: For those norms.
        norm_offset: Added to their weights.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0


class Attention:
    """Queries, keys and values; rope and the cache; attention; the output product. This rank's heads of it.

    Args:
        ctx: What it is built from.
        prefix: Names of the weights up to "q_proj.weight".
        config: Shape of the block.
        rotary: Table of the layer's positions.
    """

    def __init__(self, ctx: BuildContext, prefix: str, config: AttentionConfig, rotary: RotaryEmbedding) -> None:
        self._ctx, self._prefix, self._config, self._rotary = ctx, prefix, config, rotary
        split = split_heads(config.num_heads, config.num_kv_heads, ctx.parallel)
        self._qkv = QkvLinear(ctx, _names(prefix, config), split, bias=config.qkv_bias)
        self.write_op = _write_op(ctx, config, split, rotary.rope.rotary_dim)
        self.attention_op = _attention_op(ctx, config, split)
        self._write = ctx.bind(self.write_op)
        self._attend = ctx.bind(self.attention_op)
        out = row_slice(f"{prefix}o_proj.weight", config.hidden_size, config.num_heads * config.head_dim, ctx.parallel)
        self._out = Linear(ctx, [out], bias=config.out_bias and ctx.parallel.rank == 0)
        self._q_weight: Tensor | None = None
        self._k_weight: Tensor | None = None

    @property
    def cache_spec(self) -> KVCacheSpec:
        """What the layer keeps of each token on this rank."""
        return self.attention_op.cache_spec

    @property
    def cache_ops(self) -> tuple[OpSpec, ...]:
        """Operations that use the plan of the layer's cache group."""
        return self.write_op, self.attention_op

    @property
    def input_formats(self) -> tuple[str | None, ...]:
        """Formats that the first products ask for."""
        return self._qkv.input_formats

    def __call__(self, x: Act, batch: Batch, plan: Plan, cache: LayerCache) -> Tensor:
        """[T, hidden_size]: a part of a sum over the ranks. Writes the step's keys and values to the cache."""
        query, key, value = self._qkv(x)
        positions, cos_sin = self._rotary.lookup(batch)
        query, key = self._write(
            QkNormRopeWriteArgs(
                query=query,
                key=key,
                value=value,
                positions=positions,
                cos_sin=cos_sin,
                cache=cache,
                plan=plan,
                q_weight=self._q_weight,
                k_weight=self._k_weight,
            )
        )
        mixed = self._attend(AttentionArgs(query=query, cache=cache, plan=plan, key=key, value=value))
        return self._out(mixed.view(mixed.shape[0], -1))

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How its weights are kept, and why."""
        yield from self._qkv.weight_schemes()
        yield from self._out.weight_schemes()

    def load(self, store: WeightStore) -> None:
        """Reads and packs the weights."""
        self._qkv.load(store)
        self._out.load(store)
        if self._config.qk_norm:
            dim = self._config.head_dim
            self._q_weight = load_vector(store, self._ctx, f"{self._prefix}q_norm.weight", dim)
            self._k_weight = load_vector(store, self._ctx, f"{self._prefix}k_norm.weight", dim)


def _names(prefix: str, config: AttentionConfig) -> QkvNames:
    return QkvNames(
        query=f"{prefix}q_proj.weight",
        key=f"{prefix}k_proj.weight",
        value=f"{prefix}v_proj.weight",
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
    )


def _write_op(ctx: BuildContext, config: AttentionConfig, split: HeadSplit, rotary_dim: int) -> QkNormRopeWriteOp:
    return QkNormRopeWriteOp(
        dtype=ctx.dtype,
        determinism=ctx.determinism,
        features=frozenset({"qk_norm"} if config.qk_norm else ()),
        num_heads=split.num_heads,
        num_kv_heads=split.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        rotary_dim=rotary_dim,
        kv_dtype=ctx.cache_dtype,
        eps=config.norm_eps if config.qk_norm else 1e-6,
        weight_offset=config.norm_offset if config.qk_norm else 0.0,
    )


def _attention_op(ctx: BuildContext, config: AttentionConfig, split: HeadSplit) -> AttentionOp:
    return AttentionOp(
        dtype=ctx.dtype,
        determinism=ctx.determinism,
        num_heads=split.num_heads,
        num_kv_heads=split.num_kv_heads,
        head_dim=config.head_dim,
        v_head_dim=config.head_dim,
        kv_dtype=ctx.cache_dtype,
        scale=config.scale,
        window=config.window,
        softcap=config.softcap,
        quantize_activations=ctx.quantize_activations,
    )
