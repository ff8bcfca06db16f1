"""GGUF tensor names to Hugging Face names, and what a converter did to the values on the way."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROPE_TENSORS", "adds_one", "hf_name", "hf_row_order"]

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the configuration, not to the weights."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_GEMMA3 = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hf_name(architecture: str, name: str) -> str:
    """The Hugging Face name of a tensor; a name that the architecture does not have is returned as it is.

    Args:
        architecture: `general.architecture` of the file.
        name: Name in the file, such as "blk.3.attn_q.weight".
    """
    match = _PATTERN.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
    stems = _LAYER_GEMMA3 if architecture == "gemma3" else _LAYER
    return f"model.layers.{layer}.{stems[stem]}.{kind}" if stem in stems else name


def hf_row_order(architecture: str, name: str, config: dict[str, Any]) -> Tensor | None:
    """Indices, [out], int64, that bring the file's rows into Hugging Face order; None where they are in order.

    A file of architecture "llama" keeps the two halves of each rotary pair in neighbouring rows of q and k, Hugging
    Face keeps all first halves of a head before all second ones. Whole rows move, so quantized rows can too.

    Args:
        name: Hugging Face name.
        config: Hugging Face configuration.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2]
    if architecture != "llama" or module not in heads:
        return None
    pairs = torch.arange(heads[module] * config["head_dim"]).view(heads[module], config["head_dim"] // 2, 2)
    return pairs.transpose(1, 2).reshape(-1)


def adds_one(architecture: str, name: str) -> bool:
    """Whether the file holds 1 + w where Hugging Face holds w: the norms of Gemma."""
    return architecture == "gemma3" and name.endswith("norm.weight")
