"""Tiny models that the suite makes itself: random ones of five architectures, and one that copies with a wide margin.

Everything is made once a process, in a temporary folder that goes away with it.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

__all__ = [
    "COPY_DISTANCE",
    "ENGINE_MODELS",
    "MODELS",
    "NUM_TOKENS",
    "VOCAB_ROWS",
    "copy_next",
    "hf_model",
    "model_folder",
    "write_tokenizer",
]

VOCAB_ROWS = 264
"""Rows of embedding and head; the last ones are padding."""
_SPECIAL = ("<s>", "</s>", "<pad>")
NUM_TOKENS = 256 + len(_SPECIAL)
"""Ids that the tokenizer knows."""
COPY_DISTANCE = 37
"""The copy model's next token follows from the token this far behind the newest one."""
_POSITIONS = 1024

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": _POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON))


def _gemma3() -> torch.nn.Module:
    own = {
        "head_dim": 32,
        "num_hidden_layers": 3,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    }
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**_COMMON, **own}))


def _qwen2() -> torch.nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_COMMON))


def _qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**_COMMON, "head_dim": 32}))


def _mistral() -> torch.nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**{**_COMMON, "sliding_window": 21}))


def _copy() -> torch.nn.Module:
    """One layer whose attention picks the token COPY_DISTANCE back and whose head says what follows it."""
    own = {
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_COMMON, **own}))
    for parameter in model.parameters():
        parameter.data.zero_()
    _write_copy_weights(model)
    return model


def _write_copy_weights(model: Any) -> None:
    """Keys are constant and queries constant but turned back by the distance, so that rope alone makes the score:

    sum over pairs of a^2 cos(frequency * (offset - distance)), largest by far at the distance. Values are the tokens'
    codes; the head compares what was copied with the codes of the tokens that lead to each token.
    """
    codes = _codes()
    layer = model.model.layers[0]
    model.model.embed_tokens.weight.data[:, :64] = codes
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
        norm.weight.data.fill_(1.0)
    attention, amplitude = layer.self_attn, math.sqrt(60.0)
    angle = COPY_DISTANCE * 30.0 ** (-torch.arange(32) / 32)
    query = torch.cat((angle.cos(), -angle.sin())) * amplitude
    attention.q_proj.bias.data = query.repeat(2)
    attention.k_proj.bias.data[:32] = amplitude
    attention.v_proj.weight.data[:, :64] = torch.eye(64)
    attention.o_proj.weight.data[64:] = torch.eye(64).repeat(1, 2) * 4.0
    follows = torch.tensor([copy_next(token) for token in range(256)])
    model.lm_head.weight.data[follows, 64:] = codes[:256]


def copy_next(token: int) -> int:
    """The token that the copy model says after a byte was seen COPY_DISTANCE back: a permutation of the bytes."""
    return (token * 5 + 17) % 256


def _codes() -> Tensor:
    """A code of 64 signs for each token; the nearest two are still far apart."""
    best, least = None, 65.0
    for seed in range(40):
        draw = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 2, (VOCAB_ROWS, 64), generator=draw).float() * 2 - 1
        nearest = float((codes @ codes.T - 64 * torch.eye(VOCAB_ROWS)).max())
        if nearest < least:
            best, least = codes, nearest
    assert best is not None
    return best


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "copy": _copy,
}
"""Llama with grouped heads; Qwen2 with biases; Qwen3 with norms of queries and keys; Mistral with a sliding window in
every layer; Gemma 3 with windows in some layers, two ropes and norms everywhere; the copy model."""
ENGINE_MODELS = ("llama", "mistral", "gemma3", "copy")
"""Models of L3: those whose cache groups differ, for only these a schedule can tell apart; and the copy model."""


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="core-conformance-")


@functools.cache
def model_folder(name: str) -> Path:
    """A folder with config.json, float32 weights and a tokenizer of 256 bytes and three special tokens."""
    folder = Path(_root().name) / name
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        torch.manual_seed(len(name))
        model: Any = MODELS[name]()
        if name != "copy":
            _randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@functools.cache
def hf_model(name: str, dtype: torch.dtype) -> Any:
    """The same model in transformers."""
    folder = model_folder(name)
    with torch.inference_mode(False):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        return model.eval()


def _randomize(model: torch.nn.Module) -> None:
    """Nothing is zero or one, so that nothing can be left out unseen; matrices keep the size of what they multiply."""
    is_gemma = "Gemma" in type(model).__name__
    offset = 0.0 if is_gemma else 1.0
    embedding = 0.05 if is_gemma else 1.0  # Gemma multiplies by 8, and its tied head would only repeat the input
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() == 2:
            parameter.data = noise * (embedding if "embed_tokens" in name else 1.3 / math.sqrt(parameter.shape[1]))
        else:
            parameter.data = noise * 0.2 + (offset if "norm" in name else 0.0)


def write_tokenizer(folder: Path) -> None:
    """The suite's tokenizer: a token for each byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[0],
        "eos_token": _SPECIAL[1],
        "pad_token": _SPECIAL[2],
        "model_max_length": _POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
