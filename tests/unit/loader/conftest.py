"""Tiny checkpoints of every format, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}

LLAMA_METADATA = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def write_folder(
    folder: Path, shards: list[Mapping[str, Tensor]], config: Mapping[str, Any] | None = None, *, index: bool = True
) -> Path:
    """A folder with config.json and one safetensors file, or shards with their index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **(config or {})}))
    if len(shards) == 1:
        save_file(dict(shards[0]), folder / "model.safetensors")
        return folder
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(tensors), folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def three_shards() -> list[Mapping[str, Tensor]]:
    """One tensor in each, and a head."""
    tensors = [{f"model.t{number}": torch.full((4, 4), float(number), dtype=torch.bfloat16)} for number in range(3)]
    tensors[0]["lm_head.weight"] = torch.ones(4, 4, dtype=torch.bfloat16)
    return list(tensors)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, str]] | None = None,
    tokenizer: Mapping[str, int] | None = None,
) -> Path:
    """A GGUF file; `tensors` are float arrays with the type to store them in ("F32", "Q8_0", ...)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**LLAMA_METADATA, **(metadata or {})}.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for name, (values, kind) in {"token_embd.weight": (np.ones((8, 32), np.float32), "F32"), **(tensors or {})}.items():
        quant = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[..., Path]:
    """`write_folder` into a folder of this test."""
    return lambda *args, **kwargs: write_folder(tmp_path / "model", *args, **kwargs)


@pytest.fixture
def gguf_of(tmp_path: Path) -> Callable[..., Path]:
    """`write_gguf` into a file of this test."""
    return lambda *args, **kwargs: write_gguf(tmp_path / "model.gguf", *args, **kwargs)


@pytest.fixture
def shards() -> list[Mapping[str, Tensor]]:
    """Tensors for three shards."""
    return three_shards()
