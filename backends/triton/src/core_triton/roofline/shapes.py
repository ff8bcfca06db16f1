"""Operations of known models at the sizes that serving meets: what `python -m core_triton.roofline` lists."""

from __future__ import annotations

from collections.abc import Mapping

from core.backend.ops import (
    ActMulOp,
    AttentionOp,
    Conv1dOp,
    EmbedOp,
    ExpertsOp,
    GatedDeltaOp,
    IndexTopkOp,
    LinearOp,
    MlaOp,
    MlaPrologOp,
    OpSpec,
    QkNormRopeWriteOp,
    ReduceNormOp,
    RouteOp,
    SampleOp,
)
from core.spec import DType
from core_triton.roofline.costs import Sizes

__all__ = ["OPERATIONS", "STEPS"]

_BF16 = DType.BFLOAT16

STEPS: Mapping[str, Sizes] = {
    "decode, 1 request": Sizes(tokens=1, requests=1, context=4096),
    "decode, 64 requests": Sizes(tokens=64, requests=64, context=4096),
    "prefill, 4096 tokens": Sizes(tokens=4096, requests=1, context=4096),
}
"""Steps by name."""


def _linear(inputs: int, outputs: int, scheme: str = "none") -> LinearOp:
    return LinearOp(dtype=_BF16, in_features=inputs, out_features=outputs, scheme=scheme)


def _attention(heads: int, kv_heads: int, dim: int, kv_dtype: DType = _BF16) -> AttentionOp:
    return AttentionOp(
        dtype=_BF16,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        kv_dtype=kv_dtype,
        scale=dim**-0.5,
        features=frozenset({"scales"}) if kv_dtype is not _BF16 else frozenset(),
    )


def _mla(*features: str) -> MlaOp:
    return MlaOp(
        dtype=_BF16,
        num_heads=128,
        latent_dim=512,
        rope_dim=64,
        kv_dtype=_BF16,
        scale=192**-0.5,
        features=frozenset(features),
    )


OPERATIONS: Mapping[str, OpSpec] = {
    "Llama 3 8B gate_up": _linear(4096, 28672),
    "Llama 3 8B gate_up, fp8 channel": _linear(4096, 28672, "fp8_channel"),
    "Llama 3 8B gate_up, int8": _linear(4096, 28672, "int8"),
    "Llama 3 8B head": _linear(4096, 128256),
    "Llama 3 8B attention": _attention(32, 8, 128),
    "Llama 3 8B attention, fp8 cache": _attention(32, 8, 128, DType.FLOAT8_E4M3FN),
    "Llama 3 8B embed": EmbedOp(dtype=_BF16, dim=4096),
    "Llama 3 8B norm": ReduceNormOp(dtype=_BF16, dim=4096, eps=1e-5),
    "Llama 3 8B act_mul": ActMulOp(dtype=_BF16, size=14336),
    "Qwen3 8B norm, rope, write": QkNormRopeWriteOp(
        dtype=_BF16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        rotary_dim=128,
        kv_dtype=_BF16,
        features=frozenset({"qk_norm"}),
    ),
    "sample of 128256": SampleOp(dtype=DType.FLOAT32, vocab_size=128256),
    "DeepSeek V3 mla": _mla(),
    "DeepSeek V3.2 mla, sparse": _mla("sparse"),
    "DeepSeek V3 mla_prolog": MlaPrologOp(
        dtype=_BF16, num_heads=128, nope_dim=128, latent_dim=512, rope_dim=64, kv_dtype=_BF16, eps=1e-6
    ),
    "DeepSeek V3.2 index_topk": IndexTopkOp(dtype=_BF16, num_heads=64, head_dim=128, top_k=2048, kv_dtype=_BF16),
    "DeepSeek V3 route": RouteOp(
        dtype=DType.FLOAT32, num_experts=256, top_k=8, scoring="sigmoid", num_groups=8, top_k_groups=4, scaling=2.5
    ),
    "DeepSeek V3 experts, fp8 blocks, of 8 ranks": ExpertsOp(
        dtype=_BF16, num_experts=32, hidden_size=7168, intermediate_size=2048, top_k=8, scheme="fp8_block"
    ),
    "Qwen3-Next conv1d": Conv1dOp(dtype=_BF16, channels=8192, width=4),
    "Qwen3-Next gated_delta": GatedDeltaOp(
        dtype=_BF16, num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, scale=128**-0.5
    ),
}
"""Operations by name, whole where no number of ranks is said."""
