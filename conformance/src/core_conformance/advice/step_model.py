"""A model with the proportions of a small real one, for measuring where time goes; its weights mean nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

__all__ = ["CONFIG", "write_step_model"]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
"""A dense decoder of about 15 million parameters: large enough that its products outweigh the calls around them."""


def write_step_model(folder: Path) -> Path:
    """Writes config.json and random weights into a folder, and gives it."""
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=draw) * shape[1] ** -0.5).bfloat16()
        for name, shape in _shapes().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner, head_dim = 512, 1408, 64
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (8 * head_dim, hidden),
        "self_attn.k_proj": (2 * head_dim, hidden),
        "self_attn.v_proj": (2 * head_dim, hidden),
        "self_attn.o_proj": (hidden, 8 * head_dim),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (8192, hidden), "model.norm.weight": (hidden,)}
    return shapes | {f"model.layers.{i}.{name}.weight": shape for i in range(4) for name, shape in layer.items()}
