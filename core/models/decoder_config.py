"""A dense decoder in terms of its own: what every architecture's configuration is read into."""

from __future__ import annotations

from dataclasses import dataclass

from core.backend.ops import Activation
from core.layers import AttentionConfig, ParallelContext, RopeConfig, WeightStore
from core.layers.parallel import split_heads
from core.spec import CacheKind, DType, KVCacheSpec, ModelSpec

__all__ = ["DecoderConfig"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that tells one dense decoder from another.

    Args:
        architecture: Name as in config.json.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward block.
        num_heads: Query heads.
        num_kv_heads: Heads of key and value.
        head_dim: Elements of a head.
        vocab_rows: Rows of embedding and head, padding included.
        norm_eps: Added to the mean square of every norm.
        windows: For each layer the tokens that a query sees, itself included; 0 means all.
        ropes: For each layer its rotary settings.
        attention_scale: What query times key is multiplied by.
        activation: Of the feed-forward gate.
        tied: Whether the head reads the embedding.
        qkv_bias: Whether query, key and value products have biases.
        out_bias: Whether the attention's output product has one.
        mlp_bias: Whether the feed-forward products have biases.
        qk_norm: Whether query and key heads are normed.
        norm_offset: Added to the weight of every norm.
        embed_multiplier: What embeddings are multiplied by.
        attention_softcap: Bound of attention logits; 0 means none.
        logits_softcap: Bound of the head's logits; 0 means none.
        attention_out_norm: Norm between attention and residual; None where there is none.
        mlp_in_norm: Norm before the feed-forward block.
        mlp_out_norm: Norm between feed-forward and residual; None where there is none.
        prefixes: What the weights' names may begin with; the first of them that a checkpoint has is taken.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_rows: int
    norm_eps: float
    windows: tuple[int, ...]
    ropes: tuple[RopeConfig, ...]
    attention_scale: float
    activation: Activation
    tied: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    embed_multiplier: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    attention_out_norm: str | None = None
    mlp_in_norm: str = "post_attention_layernorm"
    mlp_out_norm: str | None = None
    prefixes: tuple[str, ...] = ("model.",)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, of all ranks together."""
        hidden, inside = self.hidden_size, self.intermediate_size
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = hidden * (2 * query + 2 * kv) + self.qkv_bias * (query + 2 * kv) + self.out_bias * hidden
        attention += self.qk_norm * 2 * self.head_dim
        mlp = 3 * hidden * inside + self.mlp_bias * (2 * inside + hidden)
        norms = 2 + (self.attention_out_norm is not None) + (self.mlp_out_norm is not None)
        tables = self.vocab_rows * hidden * (1 if self.tied else 2)
        return tables + hidden + len(self.windows) * (attention + mlp + norms * hidden)

    def attention(self, layer: int) -> AttentionConfig:
        """Shape of a layer's attention block."""
        return AttentionConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            window=self.windows[layer],
            softcap=self.attention_softcap,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
            norm_offset=self.norm_offset,
        )

    def find_prefix(self, weights: WeightStore | None) -> str:
        """What the names of a checkpoint's weights begin with."""
        if weights is not None:
            for prefix in self.prefixes:
                if f"{prefix}embed_tokens.weight" in weights:
                    return prefix
        return self.prefixes[0]

    def spec(self, dtype: DType, kv_dtype: DType, *, num_tokenizer_ids: int, parallel: ParallelContext) -> ModelSpec:
        """The model's shape on one rank.

        Raises:
            ConfigError: The heads cannot be divided among the ranks.
        """
        heads = split_heads(self.num_heads, self.num_kv_heads, parallel).num_kv_heads
        return ModelSpec(
            architecture=self.architecture,
            dtype=dtype,
            hidden_size=self.hidden_size,
            vocab_size=min(num_tokenizer_ids or self.vocab_rows, self.vocab_rows),
            max_model_len=min(rope.max_model_len for rope in self.ropes),
            layers=tuple(self._cache_spec(window, heads, kv_dtype) for window in self.windows),
            num_parameters=self.num_parameters,
        )

    def _cache_spec(self, window: int, num_kv_heads: int, kv_dtype: DType) -> KVCacheSpec:
        return KVCacheSpec(
            kind=CacheKind.SLIDING if window else CacheKind.FULL,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            dtype=kv_dtype,
            window=window,
        )
