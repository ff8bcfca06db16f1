"""The models of the comparison, each in bf16, Q8_0 and Q4_0, made here from what the package index brings.

`make_models` gives, for a name, a folder with `bf16/` (safetensors, for us and vLLM) and `bf16.gguf`, `q8_0.gguf` and
`q4_0.gguf`: one set of weights in every format, so that all engines compute the same. SmolLM2 and Gemma 3 come from the
GGUF files that `core pull` brings; the Qwen3 of the 0.6B shape has random weights and SmolLM2's vocabulary.

A Q4_0 file keeps the embedding, which is the output head too, in Q8_0, as llama.cpp's own files do where its row is no
multiple of 256.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ceilings import ModelCosts
from gguf import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors.torch import save_file

from core.loader.checkpoint import open_checkpoint
from core.loader.gguf_file import GgufFile
from core.loader.hub import pull
from core.loader.quantized import QuantizedTensor
from core.text.gguf_metadata import GgufCursor, read_header
from core.text.tokenizer_files import read_gguf

__all__ = ["MODELS", "SCHEMES", "ModelFiles", "make_models", "model_costs"]

SCHEMES = ("bf16", "q8_0", "q4_0")
_ALIGNMENT = 32
_EMBEDDING = "token_embd.weight"
_QWEN3 = {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072}


@dataclass(frozen=True)
class ModelFiles:
    """Where one model lies in its formats."""

    folder: Path

    def path(self, scheme: str, *, gguf: bool) -> Path:
        """The file of a scheme; the safetensors folder for bf16 unless `gguf`."""
        return self.folder / ("bf16" if scheme == "bf16" and not gguf else f"{scheme}.gguf")


def make_models(name: str, folder: Path) -> ModelFiles:
    """The files of a model in MODELS, made where they are not there yet."""
    files = ModelFiles(folder / name)
    files.folder.mkdir(parents=True, exist_ok=True)
    if not files.path("bf16", gguf=True).is_file():
        entries, tensors = MODELS[name]()
        _write_gguf(files.path("bf16", gguf=True), entries, tensors(), "bf16")
    for scheme in SCHEMES[1:]:
        if not files.path(scheme, gguf=True).is_file():
            entries, tensors = _read(files.path("bf16", gguf=True))
            _write_gguf(files.path(scheme, gguf=True), entries, tensors(), scheme)
    if not (files.path("bf16", gguf=False) / "config.json").is_file():
        _write_folder(files.path("bf16", gguf=False), files.path("bf16", gguf=True))
    return files


def model_costs(path: Path, *, quantized: bool) -> ModelCosts:
    """What a token of the GGUF file at `path` costs (see `ceilings.limit`). All models here tie head and embedding."""
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        infos = {name: checkpoint.info(name) for name in checkpoint.names()}
    matrices = {name: info for name, info in infos.items() if len(info.shape) == 2}
    sizes = {name: info.shape[0] * info.shape[1] for name, info in matrices.items()}
    head = sizes["model.embed_tokens.weight"]
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    return ModelCosts(
        weight_bytes=sum(info.nbytes for info in matrices.values()),
        body_params=sum(sizes.values()) - head,
        head_params=head,
        attention_dims=layers * config["num_attention_heads"] * head_dim,
        kv_bytes=2 * 2 * layers * config["num_key_value_heads"] * head_dim,
        quantized=quantized,
    )


Tensors = Callable[[], Iterator[tuple[str, np.ndarray]]]
Entries = list[bytes]
"""Metadata entries as they are in the file."""


def _pulled(name: str) -> tuple[Entries, Tensors]:
    path = pull(name)
    return _read(path if path.is_file() else next(iter(sorted(path.glob("*.gguf")))))


def _read(path: Path) -> tuple[Entries, Tensors]:
    """Metadata and float32 tensors of a GGUF file."""

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        file = GgufFile(path)
        for name, tensor in file.tensors.items():
            rows = file.rows(tensor)
            if tensor.scheme != "none":
                shape = (rows.shape[0], tensor.shape[-1])
                values = QuantizedTensor(data=rows, scheme=tensor.scheme, shape=shape).dequantize()
            else:
                values = rows.view(getattr(torch, tensor.dtype))
            yield name, values.view(tensor.shape).float().numpy()

    return _entries(path), tensors


def _entries(path: Path) -> Entries:
    data = path.read_bytes()
    cursor = GgufCursor(path, memoryview(data))
    found = []
    for _ in range(read_header(cursor)[2]):
        begin = cursor.at
        cursor.string()
        cursor.value(cursor.scalar("I"))
        found.append(data[begin : cursor.at])
    return found


def _qwen3() -> tuple[Entries, Tensors]:
    """A Qwen3 of the 0.6B shape with random weights and the vocabulary of SmolLM2."""
    entries, _ = _pulled("smollm2-135m-instruct")
    kept = [entry for entry in entries if entry[8:].startswith(b"tokenizer.")]
    sizes = {
        "block_count": _QWEN3["layers"],
        "context_length": 8192,
        "embedding_length": _QWEN3["hidden"],
        "feed_forward_length": _QWEN3["ffn"],
        "attention.head_count": _QWEN3["heads"],
        "attention.head_count_kv": _QWEN3["kv_heads"],
        "attention.key_length": _QWEN3["head_dim"],
        "attention.value_length": _QWEN3["head_dim"],
    }
    own: dict[str, Any] = {"general.architecture": "qwen3", **{f"qwen3.{key}": value for key, value in sizes.items()}}
    own |= {"qwen3.rope.freq_base": 1e6, "qwen3.attention.layer_norm_rms_epsilon": 1e-6}
    return [*(_entry(key, value) for key, value in own.items()), *kept], _random_qwen3


def _random_qwen3() -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    hidden, ffn, head_dim = _QWEN3["hidden"], _QWEN3["ffn"], _QWEN3["head_dim"]
    query, key = _QWEN3["heads"] * head_dim, _QWEN3["kv_heads"] * head_dim
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": head_dim, "attn_k_norm": head_dim}

    def normal(shape: tuple[int, int]) -> np.ndarray:
        return 0.02 * rng.standard_normal(shape, dtype=np.float32)

    yield _EMBEDDING, normal((49152, hidden))
    for layer in range(_QWEN3["layers"]):
        for stem, shape in matrices.items():
            yield f"blk.{layer}.{stem}.weight", normal(shape)
        for stem, size in norms.items():
            yield f"blk.{layer}.{stem}.weight", np.ones(size, dtype=np.float32)
    yield "output_norm.weight", np.ones(hidden, dtype=np.float32)


def _entry(key: str, value: Any) -> bytes:
    """A metadata entry: key, type (4 uint32, 6 float32, 8 string), value."""
    name = struct.pack("<Q", len(key)) + key.encode()
    if isinstance(value, str):
        return name + struct.pack("<IQ", 8, len(value)) + value.encode()
    return name + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def _write_gguf(path: Path, entries: Entries, tensors: Iterator[tuple[str, np.ndarray]], scheme: str) -> None:
    """GGUF of version 3: header, metadata, where each tensor is, then the tensors at multiples of 32 bytes."""
    places, blobs, at = [], [], 0
    for name, values in tensors:
        kind = _kind(name, values, scheme)
        blob = quantize(np.ascontiguousarray(values), kind).tobytes()
        shape = values.shape[::-1]
        place = struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        places.append(place + struct.pack("<IQ", int(kind), at))
        blobs.append(blob + b"\0" * (-len(blob) % _ALIGNMENT))
        at += len(blobs[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(places), len(entries)) + b"".join([*entries, *places])
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(head + b"\0" * (-len(head) % _ALIGNMENT))
        file.writelines(blobs)
    part.rename(path)


def _kind(name: str, values: np.ndarray, scheme: str) -> Kind:
    if values.ndim < 2:
        return Kind.F32
    return Kind.Q8_0 if scheme == "q4_0" and name == _EMBEDDING else Kind[scheme.upper()]


def _write_folder(folder: Path, gguf: Path) -> None:
    """The same weights as a Hugging Face folder."""
    folder.mkdir(exist_ok=True)
    with open_checkpoint(gguf) as checkpoint:
        tensors = {name: checkpoint.load(name).to(torch.bfloat16).contiguous() for name in checkpoint.names()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {key: value for key, value in checkpoint.config.items() if value is not None}
        generation = checkpoint.generation_config
    backend, info = read_gguf(gguf)
    backend.save(str(folder / "tokenizer.json"))
    template = {"chat_template": info.chat_template} if isinstance(info.chat_template, str) else {}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **info.special_tokens, **template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}), encoding="utf-8")


MODELS: dict[str, Callable[[], tuple[Entries, Tensors]]] = {
    "smollm2-135m": lambda: _pulled("smollm2-135m-instruct"),
    "gemma3-270m": lambda: _pulled("gemma3-270m"),
    "qwen3-0.6b": _qwen3,
}
"""Models by name: each gives metadata entries and float32 tensors by their names in a GGUF file."""
