"""Tiny random models of every architecture, made with transformers: real files, no download.

    folder = make_tiny("LlamaForCausalLM", tmp_path)
    folder = make_tiny("MistralForCausalLM", tmp_path, sliding_window=5, num_hidden_layers=3)

The folder holds config.json, model.safetensors, generation_config.json, tokenizer.json and tokenizer_config.json. The
tokenizer knows 256 bytes and three special tokens, so the last rows of the head are padding. Weights are drawn anew for
every seed, biases and norms included: nothing is zero or one, so nothing can be left out unseen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = ["ARCHITECTURES", "NUM_TOKENIZER_IDS", "VOCAB_ROWS", "make_tiny"]

VOCAB_ROWS = 264
"""Rows of embedding and head."""
SPECIAL = ("<s>", "</s>", "<pad>")
NUM_TOKENIZER_IDS = 256 + len(SPECIAL)
"""Ids that the tokenizer knows."""

_SIZES = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 6, "head_dim": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 32, "tie_word_embeddings": True},
    "Gemma3ForCausalLM": {
        "head_dim": 32,
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    },
}
"""Architectures with what a tiny configuration of each says beyond the common sizes."""

_CONFIGS = {
    "LlamaForCausalLM": transformers.LlamaConfig,
    "MistralForCausalLM": transformers.MistralConfig,
    "Qwen2ForCausalLM": transformers.Qwen2Config,
    "Qwen3ForCausalLM": transformers.Qwen3Config,
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig,
}


def make_tiny(architecture: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Path:
    """Writes a tiny model and returns its folder.

    Args:
        architecture: A key of `ARCHITECTURES`.
        folder: Where to write; made where it is not there.
        seed: Of the weights; torch's own random state is left alone.
        dtype: Type of the stored weights.
        overrides: Fields of the transformers configuration, over the tiny ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = _CONFIGS[architecture](**{**_SIZES, **ARCHITECTURES[architecture], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _randomize(model: torch.nn.Module) -> None:
    """Matrices keep the size of what they multiply; norms vary around their neutral value; biases are small."""
    offset = 0.0 if "Gemma" in type(model).__name__ else 1.0
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() == 2:
            parameter.data = noise * (1.0 if "embed_tokens" in name else 1.3 / math.sqrt(parameter.shape[1]))
        else:
            parameter.data = noise * 0.2 + (offset if "norm" in name else 0.0)


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "model_max_length": 128,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
