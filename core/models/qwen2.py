"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and an optional window in the upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.layers import parse_rope
from core.models.decoder import Decoder
from core.models.decoder_config import DecoderConfig
from core.models.hf_config import HfConfig

__all__ = ["Qwen2ForCausalLM", "qwen_windows"]


class Qwen2ForCausalLM(Decoder):
    """Biases on query, key and value alone; windows as `qwen_windows` reads them."""

    architectures = ("Qwen2ForCausalLM",)

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
            windows=qwen_windows(hf, num_layers),
            ropes=(parse_rope(config, hf.head_dim),) * num_layers,
            attention_scale=hf.head_dim**-0.5,
            activation=hf.activation("hidden_act", "silu"),
            tied=hf.flag("tie_word_embeddings"),
            qkv_bias=True,
        )


def qwen_windows(hf: HfConfig, num_layers: int) -> tuple[int, ...]:
    """For each layer the tokens that a query sees; 0 means all.

    `sliding_window` counts only where `use_sliding_window` is set, and then for the layers that `layer_types` names,
    or from `max_window_layers` on.
    """
    if not hf.flag("use_sliding_window") or hf.get("sliding_window") is None:
        return (0,) * num_layers
    window, kinds = hf.count("sliding_window"), hf.layer_types(num_layers)
    if kinds is None:
        first = hf.get("max_window_layers", 28)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
