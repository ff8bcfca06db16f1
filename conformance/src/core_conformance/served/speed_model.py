"""A model whose decode step is mostly the reading of its weights, made by the suite with random numbers."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from core_conformance.engines.models import VOCAB_ROWS, write_tokenizer

__all__ = ["SpeedShape", "shape_of", "speed_folder"]


class SpeedShape:
    """Sizes of a Llama without a large vocabulary.

    Args:
        hidden: Width; heads have 64 or 128 entries, a quarter of them keys and values.
        intermediate: Width of the feed-forward part.
        layers: Layers.
    """

    def __init__(self, hidden: int, intermediate: int, layers: int) -> None:
        self.hidden, self.intermediate, self.layers = hidden, intermediate, layers
        self.head_dim = 64
        self.heads = hidden // self.head_dim
        self.kv_heads = max(self.heads // 4, 1)

    @property
    def matrix_weights(self) -> int:
        """Weights that every token is multiplied with: those of the layers and of the head."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + VOCAB_ROWS * self.hidden


def shape_of(*, simulated: bool) -> SpeedShape:
    """90 million weights for a device; a hundredth of them for a stand-in, whose speed says nothing."""
    return SpeedShape(256, 512, 2) if simulated else SpeedShape(1024, 2816, 8)


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="core-conformance-speed-")


@functools.cache
def speed_folder(*, simulated: bool) -> Path:
    """A folder with config.json, bfloat16 weights and the suite's tokenizer."""
    shape, folder = shape_of(simulated=simulated), Path(_root().name) / f"speed-{simulated}"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_ROWS,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(_weights(shape), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def _weights(shape: SpeedShape) -> dict[str, Tensor]:
    """Every matrix is cut from one row of random numbers: drawing 90 million would take longer than the check."""
    draw = torch.randn(1 << 20, generator=torch.Generator().manual_seed(4))

    def matrix(rows: int, columns: int) -> Tensor:
        values = draw.repeat(-(-rows * columns // draw.numel()))[: rows * columns]
        return (values.view(rows, columns) / math.sqrt(columns)).to(torch.bfloat16)

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes = {
        "self_attn.q_proj": (query, shape.hidden),
        "self_attn.k_proj": (key_value, shape.hidden),
        "self_attn.v_proj": (key_value, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    weights = {"model.embed_tokens.weight": matrix(VOCAB_ROWS, shape.hidden), "model.norm.weight": ones.clone()}
    weights["lm_head.weight"] = matrix(VOCAB_ROWS, shape.hidden)
    for layer in range(shape.layers):
        head = f"model.layers.{layer}"
        weights |= {f"{head}.{name}.weight": matrix(*size) for name, size in shapes.items()}
        weights[f"{head}.input_layernorm.weight"] = ones.clone()
        weights[f"{head}.post_attention_layernorm.weight"] = ones.clone()
    return weights
