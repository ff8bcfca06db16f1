"""Gemma 3, text only: local and global layers with ropes of their own, norms around each block, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.errors import ModelLoadError
from core.layers import RopeConfig, parse_rope
from core.models.decoder import Decoder
from core.models.decoder_config import DecoderConfig
from core.models.hf_config import HfConfig

__all__ = ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"]

_SLIDING = "sliding_attention"
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_PATTERN = 6


class Gemma3ForCausalLM(Decoder):
    """Norm weights are stored as differences from 1; the query scale is a number of the configuration."""

    architectures = ("Gemma3ForCausalLM",)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """See `Decoder.read_config`."""
        hf = HfConfig(config)
        if hf.flag("use_bidirectional_attention"):
            raise ModelLoadError("config.json: use_bidirectional_attention makes no causal model; use another model")
        kinds, head_dim = _layer_kinds(hf), hf.count("head_dim", 256)
        window = 0 if hf.get("sliding_window", 4096) is None else hf.count("sliding_window", 4096)
        ropes = {kind: _rope(config, kind, head_dim) for kind in dict.fromkeys(kinds)}
        return DecoderConfig(
            architecture=cls.architectures[0],
            hidden_size=hf.count("hidden_size", 2304),
            intermediate_size=hf.count("intermediate_size", 9216),
            num_heads=hf.count("num_attention_heads", 8),
            num_kv_heads=hf.count("num_key_value_heads", 4),
            head_dim=head_dim,
            vocab_rows=hf.count("vocab_size", 262_208),
            norm_eps=hf.number("rms_norm_eps", 1e-6),
            windows=tuple(window if kind == _SLIDING else 0 for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
            attention_scale=hf.number("query_pre_attn_scalar", 256) ** -0.5,
            activation=hf.activation("hidden_activation", "gelu_pytorch_tanh"),
            tied=hf.flag("tie_word_embeddings", True),
            qkv_bias=hf.flag("attention_bias"),
            out_bias=hf.flag("attention_bias"),
            qk_norm=True,
            norm_offset=1.0,
            embed_multiplier=hf.count("hidden_size", 2304) ** 0.5,
            attention_softcap=hf.number("attn_logit_softcapping", 0.0),
            logits_softcap=hf.number("final_logit_softcapping", 0.0),
            attention_out_norm="post_attention_layernorm",
            mlp_in_norm="pre_feedforward_layernorm",
            mlp_out_norm="post_feedforward_layernorm",
            prefixes=("model.", "language_model.model.", "model.language_model."),
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a model that also sees: its configuration is nested and its weights have a longer prefix."""

    architectures = ("Gemma3ForConditionalGeneration",)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """See `Decoder.read_config`."""
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ModelLoadError("config.json: text_config is missing; fetch the model again")
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
        return super().read_config({**text, "tie_word_embeddings": tied})


def _layer_kinds(hf: HfConfig) -> tuple[str, ...]:
    num_layers = hf.count("num_hidden_layers", 26)
    kinds = hf.layer_types(num_layers)
    if kinds is not None:
        return kinds
    pattern = hf.count("sliding_window_pattern", hf.count("_sliding_window_pattern", _PATTERN))
    return tuple("full_attention" if (layer + 1) % pattern == 0 else _SLIDING for layer in range(num_layers))


def _rope(config: Mapping[str, Any], kind: str, head_dim: int) -> RopeConfig:
    """Rope of a kind of layer. An older configuration has one set for both: its scaling is the global layers' alone."""
    if kind != _SLIDING:
        rope = parse_rope(config, head_dim, layer_type=kind, theta=_GLOBAL_THETA)
        # Gemma 3's max_position_embeddings is the length after stretching, others' the length before.
        return replace(rope, max_position=int(rope.max_position / rope.stretch)) if rope.rope_type == "linear" else rope
    local = {**config, "rope_theta": config.get("rope_local_base_freq"), "rope_scaling": None}
    if not isinstance((config.get("rope_parameters") or {}).get(kind), Mapping):
        local["rope_parameters"] = None
    return parse_rope(local, head_dim, layer_type=kind, theta=_LOCAL_THETA)
