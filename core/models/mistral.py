"""Mistral: Llama with a sliding window in every layer, where the configuration has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.layers import parse_rope
from core.models.decoder import Decoder
from core.models.decoder_config import DecoderConfig
from core.models.hf_config import HfConfig

__all__ = ["MistralForCausalLM"]


class MistralForCausalLM(Decoder):
    """Attention over the last `sliding_window` tokens; null means all."""

    architectures = ("MistralForCausalLM",)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """See `Decoder.read_config`."""
        hf = HfConfig(config)
        num_layers, num_heads = hf.count("num_hidden_layers"), hf.count("num_attention_heads")
        window = 0 if hf.get("sliding_window") is None else hf.count("sliding_window")
        return DecoderConfig(
            architecture=cls.architectures[0],
            hidden_size=hf.count("hidden_size"),
            intermediate_size=hf.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=hf.count("num_key_value_heads", num_heads),
            head_dim=hf.head_dim,
            vocab_rows=hf.count("vocab_size"),
            norm_eps=hf.number("rms_norm_eps", 1e-6),
            windows=(window,) * num_layers,
            ropes=(parse_rope(config, hf.head_dim),) * num_layers,
            attention_scale=hf.head_dim**-0.5,
            activation=hf.activation("hidden_act", "silu"),
            tied=hf.flag("tie_word_embeddings"),
        )
