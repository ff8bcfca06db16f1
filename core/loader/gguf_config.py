"""GGUF metadata to the terms of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.loader.gguf_rope import RopeFactors, rope_config

__all__ = ["GgufMetadata", "hf_config", "hf_generation_config"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MODEL_TYPES = {"gemma3": "gemma3_text"}
_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62


class GgufMetadata:
    """Metadata of a file, with errors that name file and key.

    Args:
        path: The file, for messages.
        values: The file's metadata.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.architecture = str(values.get("general.architecture", ""))
        if self.architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{path} is of architecture {self.architecture!r}; supported in GGUF are {', '.join(_ARCHITECTURES)}: "
                "use a safetensors checkpoint of this model or another model"
            )
        if self.get("expert_count", 0):
            raise ModelLoadError(f"{path} has {self.get('expert_count')} experts, unsupported in GGUF; use safetensors")

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `<architecture>.<key>`; a per-layer list of equal values counts as that value."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]
        return value

    def number(self, key: str) -> int:
        """A count that the file must have."""
        value = self.get(key)
        if not isinstance(value, int) or value < 1:
            raise ModelLoadError(
                f"{self.path}: metadata {self.architecture}.{key} is {value!r}, one positive number is needed; "
                "convert the model again"
            )
        return value


def hf_config(meta: GgufMetadata, shapes: Mapping[str, tuple[int, ...]], factors: RopeFactors) -> dict[str, Any]:
    """The file's configuration as config.json of the same model would have it.

    Args:
        meta: Metadata of the file.
        shapes: Shape of each tensor, by its name in the file.
        factors: The file's rotary factor tensors.

    Raises:
        ModelLoadError: A key or the embedding is missing.
    """
    if "token_embd.weight" not in shapes:
        raise ModelLoadError(f"{meta.path} has no tensor token_embd.weight; fetch a complete file")
    config = {
        "architectures": [_ARCHITECTURES[meta.architecture]],
        "model_type": _MODEL_TYPES.get(meta.architecture, meta.architecture),
        "hidden_act": "silu",
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon", 1e-6),
    }
    config |= _sizes(meta) | _special_tokens(meta) | rope_config(meta, factors)
    return config | _gemma3(meta, config) if meta.architecture == "gemma3" else config


def hf_generation_config(meta: GgufMetadata) -> dict[str, Any]:
    """What generation_config.json would say: the ids that end a generation, the end of a turn among them."""
    eos = [meta.values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return {"eos_token_id": list(dict.fromkeys(token for token in eos if token is not None))}


def _sizes(meta: GgufMetadata) -> dict[str, Any]:
    num_heads, hidden_size = meta.number("attention.head_count"), meta.number("embedding_length")
    head_dim = meta.get("attention.key_length") or meta.get("rope.dimension_count") or hidden_size // num_heads
    num_kv_heads = num_heads
    if meta.get("attention.head_count_kv") is not None:
        num_kv_heads = meta.number("attention.head_count_kv")
    if meta.get("attention.value_length", head_dim) != head_dim:
        raise ModelLoadError(f"{meta.path}: key and value heads differ in size; use a safetensors checkpoint")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": meta.number("feed_forward_length"),
        "num_hidden_layers": meta.number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": meta.number("context_length"),
    }


def _special_tokens(meta: GgufMetadata) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "padding": "pad"}
    return {f"{hf}_token_id": meta.values.get(f"tokenizer.ggml.{key}_token_id") for key, hf in keys.items()}


def _gemma3(meta: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 3 has beyond Llama. The file does not say the query scale: the largest model alone differs."""
    num_layers, scale = config["num_hidden_layers"], config["head_dim"]
    if num_layers == _GEMMA3_27B_LAYERS:
        scale = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": meta.number("attention.sliding_window"),
        "layer_types": _layer_types(meta.get("attention.sliding_window_pattern", _GEMMA3_PATTERN), num_layers),
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scale,
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
    }


def _layer_types(pattern: int | list[bool] | bool, num_layers: int) -> list[str]:
    if isinstance(pattern, bool):
        pattern = [pattern] * num_layers
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
