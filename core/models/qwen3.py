"""Qwen3: query and key heads are normed before rope; head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.layers import parse_rope
from core.models.decoder import Decoder
from core.models.decoder_config import DecoderConfig
from core.models.hf_config import HfConfig
from core.models.qwen2 import qwen_windows

__all__ = ["Qwen3ForCausalLM"]

_HEAD_DIM = 128


class Qwen3ForCausalLM(Decoder):
    """Norms of query and key heads; biases only where `attention_bias` asks for them."""

    architectures = ("Qwen3ForCausalLM",)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """See `Decoder.read_config`."""
        hf = HfConfig(config)
        num_layers, num_heads = hf.count("num_hidden_layers"), hf.count("num_attention_heads")
        head_dim = hf.count("head_dim", _HEAD_DIM)
        return DecoderConfig(
            architecture=cls.architectures[0],
            hidden_size=hf.count("hidden_size"),
            intermediate_size=hf.count("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=hf.count("num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_rows=hf.count("vocab_size"),
            norm_eps=hf.number("rms_norm_eps", 1e-6),
            windows=qwen_windows(hf, num_layers),
            ropes=(parse_rope(config, head_dim),) * num_layers,
            attention_scale=head_dim**-0.5,
            activation=hf.activation("hidden_act", "silu"),
            tied=hf.flag("tie_word_embeddings"),
            qkv_bias=hf.flag("attention_bias"),
            out_bias=hf.flag("attention_bias"),
            qk_norm=True,
        )
