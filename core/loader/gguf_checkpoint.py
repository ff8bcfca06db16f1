"""A GGUF file, or the pieces of a split one, as a checkpoint with Hugging Face names and values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.errors import ModelLoadError
from core.loader.gguf_config import GgufMetadata, hf_config, hf_generation_config
from core.loader.gguf_file import GgufFile, GgufTensor
from core.loader.gguf_names import ROPE_TENSORS, adds_one, hf_name, hf_row_order
from core.loader.quantized import QuantizedTensor
from core.loader.tensor_info import Checkpoint, TensorInfo

__all__ = ["GgufCheckpoint", "split_files"]

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint(Checkpoint):
    """Opens GGUF files.

    Args:
        path: A GGUF file; of a split model, any piece.

    Raises:
        ModelLoadError: A piece is missing, a file is damaged, or the model is of an unknown architecture.
    """

    def __init__(self, path: Path) -> None:
        self._files = [GgufFile(piece) for piece in split_files(path)]
        self.metadata: dict[str, Any] = self._files[0].metadata
        self._placed = _place_tensors(self._files)
        meta = GgufMetadata(path, self.metadata)
        self._gguf_architecture = meta.architecture
        factors = {name: self._read(name).flatten().tolist() for name in ROPE_TENSORS if name in self._placed}
        shapes = {name: tensor.shape for name, (_, tensor) in self._placed.items()}
        self._names = {hf_name(meta.architecture, name): name for name in shapes if name not in ROPE_TENSORS}
        infos = {name: _info(self._placed[raw][1]) for name, raw in self._names.items()}
        config = hf_config(meta, shapes, factors) | {"dtype": _activation_dtype(infos.values())}
        super().__init__(path, config, hf_generation_config(meta), infos)
        self._check_rows()

    def load(self, name: str) -> Tensor:
        """A tensor as dense numbers: as stored, float32 where it was quantized. Read-only; may be a mapped view."""
        self.info(name)
        order = self._row_order(name)
        values = self._read(self._names[name])
        if order is not None:
            values = values[order]
        return values - 1 if adds_one(self._gguf_architecture, name) else values

    def load_quantized(self, name: str) -> QuantizedTensor | None:
        """A weight as stored, read-only; None where it is dense."""
        info = self.info(name)
        if info.scheme == "none" or len(info.shape) != 2:
            return None
        order = self._row_order(name)
        weight = self._quantized(self._names[name])
        return weight if order is None else weight.take_rows(order)

    def close(self) -> None:
        """Let go of the files. Tensors already loaded stay valid."""
        for file in self._files:
            file.close()

    def _read(self, raw: str) -> Tensor:
        file, tensor = self._placed[raw]
        if tensor.scheme != "none":
            return self._quantized(raw).dequantize().view(tensor.shape)
        return file.rows(tensor).view(getattr(torch, tensor.dtype)).view(tensor.shape)

    def _quantized(self, raw: str) -> QuantizedTensor:
        file, tensor = self._placed[raw]
        shape = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
        return QuantizedTensor(data=file.rows(tensor), scheme=tensor.scheme, shape=shape)

    def _row_order(self, name: str) -> Tensor | None:
        return hf_row_order(self._gguf_architecture, name, self.config)

    def _check_rows(self) -> None:
        """A head count that does not fit its matrix would only show as gibberish."""
        for name in self._names:
            order, num_rows = self._row_order(name), self.info(name).shape[0]
            if order is not None and len(order) != num_rows:
                raise ModelLoadError(
                    f"{self.path}: {name} has {num_rows} rows and the metadata asks for {len(order)} "
                    f"(head_dim {self.config['head_dim']}); convert the model again"
                )


def split_files(path: Path) -> list[Path]:
    """All pieces of a model of which `path` is one; `[path]` where it is not split.

    Raises:
        ModelLoadError: Pieces are missing; the message lists them.
    """
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    pieces = [path.with_name(f"{stem}-{index:05d}-of-{count}.gguf") for index in range(1, int(count) + 1)]
    missing = [piece.name for piece in pieces if not piece.is_file()]
    if missing:
        raise ModelLoadError(
            f"{path.parent} lacks {', '.join(missing)} of the split GGUF model; fetch the missing files"
        )
    return pieces


def _place_tensors(files: Sequence[GgufFile]) -> dict[str, tuple[GgufFile, GgufTensor]]:
    placed: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in placed:
                raise ModelLoadError(
                    f"tensor {name!r} is in {placed[name][0].path.name} and {file.path.name}; fetch again"
                )
            placed[name] = (file, tensor)
    return placed


def _activation_dtype(infos: Collection[TensorInfo]) -> str:
    """The type to compute in: that of the dense matrices, bfloat16 where they are quantized or of several types."""
    dense = {info.dtype for info in infos if len(info.shape) > 1 and info.scheme == "none"}
    quantized = any(info.scheme != "none" for info in infos)
    return "bfloat16" if quantized or len(dense) != 1 else dense.pop()


def _info(tensor: GgufTensor) -> TensorInfo:
    return TensorInfo(tensor.shape, tensor.scheme, tensor.dtype, tensor.nbytes)
