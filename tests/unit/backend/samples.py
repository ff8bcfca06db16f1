"""One OpSpec of every operation of the contract, small."""

from __future__ import annotations

from core.backend import canonical_layout
from core.backend import ops as o
from core.backend.ops import OpSpec
from core.spec import CacheKind, DType, KVCacheSpec

_F32 = DType.FLOAT32
_LAYOUT = canonical_layout(
    KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=2, head_dim=8, v_head_dim=8, dtype=_F32), block_size=4
)

SAMPLES: dict[str, OpSpec] = {
    op.name: op
    for op in (
        o.EmbedOp(dtype=_F32, dim=8),
        o.LinearOp(dtype=_F32, in_features=8, out_features=4),
        o.RmsNormOp(dtype=_F32, dim=8, eps=1e-6),
        o.ActMulOp(dtype=_F32, size=4),
        o.RopeOp(dtype=_F32, num_heads=2, num_kv_heads=1, head_dim=8, rotary_dim=8),
        o.SampleOp(dtype=_F32, vocab_size=16),
        o.ApplyTokenBitmaskOp(dtype=_F32, vocab_size=16),
        o.RejectionSampleOp(dtype=_F32, vocab_size=16, num_spec_tokens=2),
        o.AdvanceOp(dtype=_F32, block_sizes=(4,)),
        o.KvWriteOp(dtype=_F32, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=_F32),
        o.AttentionOp(dtype=_F32, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, kv_dtype=_F32, scale=0.5),
        o.ReduceNormOp(dtype=_F32, dim=8, eps=1e-6),
        o.QkNormRopeWriteOp(
            dtype=_F32, num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, rotary_dim=8, kv_dtype=_F32
        ),
        o.MlaPrologOp(dtype=_F32, num_heads=2, nope_dim=4, latent_dim=8, rope_dim=4, kv_dtype=_F32, eps=1e-6),
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
        o.LoraAddOp(dtype=_F32, in_features=8, out_features=4, rank=2, num_adapters=2),
        o.MoveTokensOp(dtype=_F32, layout=_LAYOUT),
        o.ExportBlocksOp(dtype=_F32, layout=_LAYOUT),
        o.ImportBlocksOp(dtype=_F32, layout=_LAYOUT),
    )
}
