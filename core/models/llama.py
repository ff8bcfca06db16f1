"""Llama and models of its shape, SmolLM2 among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.layers import parse_rope
from core.models.decoder import Decoder
from core.models.decoder_config import DecoderConfig
from core.models.hf_config import HfConfig

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(Decoder):
    """Full attention with grouped heads, rope, gated feed-forward, norm before each block."""

    architectures = ("LlamaForCausalLM",)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """See `Decoder.read_config`."""
        hf = HfConfig(config)
        num_layers, num_heads = hf.count("num_hidden_layers"), hf.count("num_attention_heads")
        return DecoderConfig(
            architecture=cls.architectures[0],
            hidden_size=hf.count("hidden_size"),
            intermediate_size=hf.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=hf.count("num_key_value_heads", num_heads),
            head_dim=hf.head_dim,
            vocab_rows=hf.count("vocab_size"),
            norm_eps=hf.number("rms_norm_eps", 1e-6),
            windows=(0,) * num_layers,
            ropes=(parse_rope(config, hf.head_dim),) * num_layers,
            attention_scale=hf.head_dim**-0.5,
            activation=hf.activation("hidden_act", "silu"),
            tied=hf.flag("tie_word_embeddings"),
            qkv_bias=hf.flag("attention_bias"),
            out_bias=hf.flag("attention_bias"),
            mlp_bias=hf.flag("mlp_bias"),
        )
