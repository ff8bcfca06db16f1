"""Building blocks of models: each holds its operations and weights, and is called with tensors."""

from __future__ import annotations

from core.layers.attention import Attention, AttentionConfig
from core.layers.context import BuildContext, ParallelContext
from core.layers.embedding import Embedding, Head
from core.layers.linear import Linear, QkvLinear
from core.layers.mlp import GatedMlp
from core.layers.norm import ReduceNorm, RmsNorm
from core.layers.rope_config import RopeConfig, parse_rope
from core.layers.rotary import RotaryEmbedding, make_rotary
from core.layers.scheme_choice import SchemeChoice
from core.layers.weights import WeightSlice, WeightStore

__all__ = [
    "Attention",
    "AttentionConfig",
    "BuildContext",
    "Embedding",
    "GatedMlp",
    "Head",
    "Linear",
    "ParallelContext",
    "QkvLinear",
    "ReduceNorm",
    "RmsNorm",
    "RopeConfig",
    "RotaryEmbedding",
    "SchemeChoice",
    "WeightSlice",
    "WeightStore",
    "make_rotary",
    "parse_rope",
]
