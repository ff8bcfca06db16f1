"""The decoder that all dense architectures share; their files say what a configuration means in its terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from core.backend.batch import Batch, Plan
from core.backend.ops import Act, LayerCache, OpSpec
from core.layers import (
    Attention,
    BuildContext,
    Embedding,
    GatedMlp,
    Head,
    ParallelContext,
    ReduceNorm,
    RmsNorm,
    RopeConfig,
    RotaryEmbedding,
    SchemeChoice,
    WeightStore,
    make_rotary,
)
from core.models.decoder_config import DecoderConfig
from core.spec import DType, ModelSpec

__all__ = ["Decoder", "DecoderLayer"]


class DecoderLayer:
    """Attention, feed-forward, and after each the norm that the next block reads.

    Args:
        ctx: What it is built from.
        config: The model.
        prefix: Names of the layer's weights up to "self_attn".
        attention: The attention block.
        mlp: The feed-forward block.
        next_norm: Norm that the next layer, or the head, reads.
        next_formats: Formats of activation that they ask for.
    """

    def __init__(
        self,
        ctx: BuildContext,
        config: DecoderConfig,
        prefix: str,
        attention: Attention,
        mlp: GatedMlp,
        *,
        next_norm: str,
        next_formats: Sequence[str | None],
    ) -> None:
        self.attention = attention
        self._mlp = mlp
        self._after_attention = _reduce_norm(
            ctx,
            config,
            f"{prefix}{config.mlp_in_norm}.weight",
            _optional(prefix, config.attention_out_norm),
            mlp.input_formats,
        )
        self._after_mlp = _reduce_norm(ctx, config, next_norm, _optional(prefix, config.mlp_out_norm), next_formats)

    def __call__(self, x: Act, residual: Tensor, batch: Batch, plan: Plan, cache: LayerCache) -> tuple[Act, Tensor]:
        """(normed, residual) for what follows."""
        x, residual = self._after_attention(self.attention(x, batch, plan, cache), residual)
        return self._after_mlp(self._mlp(x), residual)

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How its weights are kept, and why."""
        yield from self.attention.weight_schemes()
        yield from self._mlp.weight_schemes()

    def load(self, store: WeightStore) -> None:
        """Reads and packs the weights."""
        for part in (self.attention, self._mlp, self._after_attention, self._after_mlp):
            part.load(store)


class Decoder:
    """A dense causal language model (`core.models.base.CausalLM`). An architecture gives `read_config`.

    Args:
        config: The model in the decoder's own terms.
        ctx: What it is built from.
    """

    architectures: ClassVar[tuple[str, ...]]
    """Names in config.json that the class stands for."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext) -> None:
        self.config = config
        self.spec = config.spec(
            ctx.dtype, ctx.cache_dtype, num_tokenizer_ids=ctx.num_tokenizer_ids, parallel=ctx.parallel
        )
        self._prefix = config.find_prefix(ctx.weights)
        self._rotaries = self._make_rotaries(ctx)
        self._embedding = Embedding(
            ctx,
            f"{self._prefix}embed_tokens.weight",
            config.vocab_rows,
            config.hidden_size,
            multiplier=config.embed_multiplier,
            tied=config.tied,
        )
        first = f"{self._layer(0)}input_layernorm.weight"
        self._first_norm = RmsNorm(ctx, first, config.hidden_size, config.norm_eps, weight_offset=config.norm_offset)
        self._layers = self._make_layers(ctx)
        self._head = Head(ctx, "lm_head.weight", self._embedding, tied=config.tied, softcap=config.logits_softcap)
        self._prepared: Batch | None = None

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """The model in the decoder's own terms.

        Raises:
            ModelLoadError: The configuration lacks something, or wants what the model does not have.
        """
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ctx: BuildContext) -> Self:
        """Builds the model; see `CausalLM.from_config`."""
        return cls(cls.read_config(config), ctx)

    @classmethod
    def describe(
        cls,
        config: Mapping[str, Any],
        dtype: DType,
        *,
        kv_dtype: DType | None = None,
        num_tokenizer_ids: int = 0,
        world: int = 1,
    ) -> ModelSpec:
        """The model's shape from its configuration alone; see `CausalLM.describe`."""
        parallel = ParallelContext(world=world)
        decoder = cls.read_config(config)
        return decoder.spec(dtype, kv_dtype or dtype, num_tokenizer_ids=num_tokenizer_ids, parallel=parallel)

    @property
    def cache_ops(self) -> tuple[tuple[OpSpec, ...], ...]:
        """For each layer the operations that use its plan."""
        return tuple(layer.attention.cache_ops for layer in self._layers)

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How each weight is kept on the device, and why."""
        yield from self._embedding.weight_schemes()
        for layer in self._layers:
            yield from layer.weight_schemes()
        yield from self._head.weight_schemes()

    def load(self, weights: WeightStore) -> None:
        """Reads all weights; see `CausalLM.load`."""
        for rotary in self._rotaries.values():
            rotary.load()
        self._embedding.load(weights)
        self._first_norm.load(weights)
        for layer in self._layers:
            layer.load(weights)
        self._head.load(weights)

    def prepare(self, batch: Batch) -> None:
        """Makes ready the rope tables that depend on lengths; nothing for most models."""
        for rotary in self._rotaries.values():
            rotary.prepare(batch)
        self._prepared = batch

    def forward(self, batch: Batch, plans: Sequence[Plan | None], caches: Sequence[LayerCache | None]) -> Tensor:
        """Hidden states [T, hidden_size] of a step; see `CausalLM.forward`."""
        if self._prepared is not batch:
            self.prepare(batch)
        residual = self._embedding(batch.token_ids)
        x: Act = self._first_norm(residual)
        for layer, plan, cache in zip(self._layers, plans, caches, strict=True):
            assert plan is not None and cache is not None, "every layer of a decoder has a cache"
            x, residual = layer(x, residual, batch, plan, cache)
        assert isinstance(x, Tensor), "the last norm gives plain activations"
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, rows of the head], float32; see `CausalLM.logits`."""
        return self._head(hidden)

    def _layer(self, index: int) -> str:
        return f"{self._prefix}layers.{index}."

    def _make_rotaries(self, ctx: BuildContext) -> dict[RopeConfig, RotaryEmbedding]:
        positions = min(ctx.max_model_len or self.spec.max_model_len, self.spec.max_model_len)
        return {rope: make_rotary(ctx, rope, positions) for rope in dict.fromkeys(self.config.ropes)}

    def _make_layers(self, ctx: BuildContext) -> list[DecoderLayer]:
        """Blocks first: a norm must know in which format the next block wants its input."""
        config, count = self.config, len(self.config.windows)
        attentions = [
            Attention(ctx, f"{self._layer(i)}self_attn.", config.attention(i), self._rotaries[config.ropes[i]])
            for i in range(count)
        ]
        mlps = [self._make_mlp(ctx, i) for i in range(count)]
        norms = [f"{self._layer(i)}input_layernorm.weight" for i in range(1, count)] + [f"{self._prefix}norm.weight"]
        formats = [attention.input_formats for attention in attentions[1:]] + [()]
        return [
            DecoderLayer(
                ctx, config, self._layer(i), attentions[i], mlps[i], next_norm=norms[i], next_formats=formats[i]
            )
            for i in range(count)
        ]

    def _make_mlp(self, ctx: BuildContext, index: int) -> GatedMlp:
        config = self.config
        return GatedMlp(
            ctx,
            f"{self._layer(index)}mlp.",
            config.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=config.mlp_bias,
        )


def _reduce_norm(
    ctx: BuildContext, config: DecoderConfig, name: str, post_name: str | None, formats: Sequence[str | None]
) -> ReduceNorm:
    return ReduceNorm(
        ctx,
        name,
        config.hidden_size,
        config.norm_eps,
        weight_offset=config.norm_offset,
        post_name=post_name,
        input_formats=formats,
    )


def _optional(prefix: str, name: str | None) -> str | None:
    return None if name is None else f"{prefix}{name}.weight"
