"""Forms of every operation that the suite asks about without running them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from core.backend import canonical_layout
from core.backend import ops as o
from core.backend.ops import OPERATIONS, OpSpec, newer_fields
from core.backend.schemes import SCHEMES
from core.spec import CacheKind, DType, KVCacheSpec

__all__ = ["SAMPLES", "core_operations", "variations"]

_F32, _BF16 = DType.FLOAT32, DType.BFLOAT16
_LAYOUT = canonical_layout(
    KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype=_F32), block_size=16
)
_DTYPES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)
_SCHEMES = (*(name for name in SCHEMES if name != "none"), "no_such_scheme")

SAMPLES: dict[str, OpSpec] = {
    op.name: op
    for op in (
        o.KvWriteOp(dtype=_F32, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=_F32),
        o.AttentionOp(dtype=_F32, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=_F32, scale=0.5),
        o.EmbedOp(dtype=_F32, dim=8),
        o.LinearOp(dtype=_F32, in_features=8, out_features=4, weight_dtype=_F32, out_dtype=_F32),
        o.RmsNormOp(dtype=_F32, dim=8, eps=1e-6),
        o.ActMulOp(dtype=_F32, size=4),
        o.RopeOp(dtype=_F32, num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=8),
        o.SampleOp(dtype=_F32, vocab_size=16),
        o.ApplyTokenBitmaskOp(dtype=_F32, vocab_size=16),
        o.RejectionSampleOp(dtype=_F32, vocab_size=16, num_spec_tokens=2),
        o.AdvanceOp(dtype=_F32, block_sizes=(16,)),
        o.RouteOp(dtype=_F32, num_experts=4, top_k=2),
        o.ExpertsOp(dtype=_F32, num_experts=4, hidden_size=8, intermediate_size=8, top_k=2),
        o.DispatchOp(dtype=_F32, hidden_size=8, top_k=2, capacity=4),
        o.CombineOp(dtype=_F32, hidden_size=8, capacity=4),
        o.MlaOp(dtype=_F32, num_heads=2, latent_dim=8, rope_dim=4, kv_dtype=_F32, scale=0.5),
        o.IndexTopkOp(dtype=_F32, num_heads=2, head_dim=8, top_k=4, kv_dtype=_F32),
        o.Conv1dOp(dtype=_F32, channels=8, width=4),
        o.GatedDeltaOp(dtype=_F32, num_k_heads=1, num_v_heads=2, k_dim=4, v_dim=4, scale=0.5),
        o.SsdOp(dtype=_F32, num_heads=2, head_dim=4, num_groups=1, state_dim=4),
        o.MergeLseOp(dtype=_F32, num_heads=2, v_head_dim=8),
        o.ReduceNormOp(dtype=_F32, dim=8, eps=1e-6),
        o.QkNormRopeWriteOp(
            dtype=_F32, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, rotary_dim=8, kv_dtype=_F32
        ),
        o.MlaPrologOp(dtype=_F32, num_heads=2, nope_dim=4, latent_dim=8, rope_dim=4, kv_dtype=_F32, eps=1e-6),
        o.LoraAddOp(dtype=_F32, in_features=8, out_features=4, rank=2, num_adapters=2),
        o.MoveTokensOp(dtype=_F32, layout=_LAYOUT),
        o.ExportBlocksOp(dtype=_F32, layout=_LAYOUT),
        o.ImportBlocksOp(dtype=_F32, layout=_LAYOUT),
    )
}
"""One small form of every operation of the contract."""

assert set(SAMPLES) == set(OPERATIONS), set(SAMPLES) ^ set(OPERATIONS)


def variations(built_minor: int) -> Iterator[OpSpec]:
    """Every sample in every dtype, with every feature of its record, and special forms of linear and attention.

    Args:
        built_minor: Minor that the plugin was built for: nothing of a later one, about which no plugin is asked.
    """
    yield from (op for op in _variations() if op.minor <= built_minor and not newer_fields(op, built_minor))


def _variations() -> Iterator[OpSpec]:
    for op in SAMPLES.values():
        features = {f.metadata["feature"] for f in dataclasses.fields(op.args) if "feature" in f.metadata}
        for dtype in _DTYPES:
            yield dataclasses.replace(op, dtype=dtype)
        yield from (dataclasses.replace(op, features=frozenset({feature})) for feature in sorted(features))
        yield dataclasses.replace(op, features=frozenset({"no_such_feature"}))
    linear, attention = SAMPLES["linear"], SAMPLES["attention"]
    assert isinstance(linear, o.LinearOp) and isinstance(attention, o.AttentionOp)
    yield from (dataclasses.replace(linear, scheme=scheme) for scheme in _SCHEMES)
    yield dataclasses.replace(attention, softcap=2.0)
    yield dataclasses.replace(attention, causal=False)
    yield dataclasses.replace(attention, window=5)
    yield dataclasses.replace(attention, head_dim=1024, v_head_dim=1024)


def core_operations(dtype: DType) -> Iterator[OpSpec]:
    """What no backend may decline, in one of the half precisions."""
    yield o.EmbedOp(dtype=dtype, dim=64)
    yield o.LinearOp(dtype=dtype, in_features=64, out_features=96, weight_dtype=dtype, out_dtype=dtype)
    yield o.LinearOp(dtype=dtype, in_features=64, out_features=96, weight_dtype=dtype, out_dtype=DType.FLOAT32)
    yield o.RmsNormOp(dtype=dtype, dim=64, eps=1e-6)
    yield o.ActMulOp(dtype=dtype, size=64)
    yield o.KvWriteOp(dtype=dtype, num_kv_heads=2, head_dim=64, v_head_dim=64, kv_dtype=dtype)
    yield o.AttentionOp(
        dtype=dtype, num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, kv_dtype=dtype, scale=0.125
    )
    yield o.SampleOp(dtype=DType.FLOAT32, vocab_size=300)
