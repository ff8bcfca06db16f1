"""A folder with config.json and safetensors files as a checkpoint, quantized weights included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from core.backend.schemes import scale_values
from core.errors import ModelLoadError
from core.loader.quantization_config import QuantizationFormat, detect_quantization
from core.loader.quantized import QuantizedTensor
from core.loader.safetensors_files import SafetensorsFiles, read_json
from core.loader.tensor_info import Checkpoint, TensorInfo

__all__ = ["SafetensorsCheckpoint"]

_TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text", "gemma3")
_SCALE_SUFFIXES = ("weight_scale", "weight_scale_inv", "input_scale")


class SafetensorsCheckpoint(Checkpoint):
    """Opens a folder.

    Args:
        folder: Holds config.json and model.safetensors, or the shards of an index.

    Raises:
        ModelLoadError: The folder is incomplete or damaged, or its quantization is not supported.
    """

    def __init__(self, folder: Path) -> None:
        config = _read_config(folder)
        self._format = detect_quantization(folder, config)
        self._files = SafetensorsFiles.open(folder)
        try:
            tensors, self._scales = _join_scales(folder, self._files.infos, self._format)
        except BaseException:
            self._files.stack.close()
            raise
        generation = folder / "generation_config.json"
        super().__init__(folder, config, read_json(generation) if generation.is_file() else {}, tensors)

    def load(self, name: str) -> Tensor:
        """A tensor as dense numbers: as stored, float32 where it was quantized. Read-only; may be a mapped view."""
        quantized = self.load_quantized(name)
        return self._read(name) if quantized is None else quantized.dequantize()

    def load_quantized(self, name: str) -> QuantizedTensor | None:
        """A weight as stored, read-only; None where it is dense."""
        info = self.info(name)
        if name not in self._scales:
            return None
        out, width = info.shape
        scale = scale_values(self._read(self._scales[name])).reshape(self._scale_shape(info.shape))
        if info.scheme != "fp8_block":
            scale = scale.expand(out, 1)
        return QuantizedTensor(data=self._read(name), scheme=info.scheme, shape=(out, width), scale=scale)

    def close(self) -> None:
        """Let go of the files. Tensors already loaded stay valid."""
        self._files.stack.close()
        self._files.handles.clear()

    def _read(self, name: str) -> Tensor:
        if name not in self._files.handles:
            raise ModelLoadError(f"{self.path} is closed; open the checkpoint again")
        tensor: Tensor = self._files.handles[name].get_tensor(name)
        return tensor

    def _scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        assert self._format is not None
        return self._format.scale_shape(shape)


def _read_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelLoadError(f"{folder / 'config.json'} names no architectures; add the model's class name")
    config.setdefault("tie_word_embeddings", config.get("model_type") in _TIED_BY_DEFAULT)
    config["dtype"] = config.get("dtype") or config.get("torch_dtype") or "float32"
    return config


def _join_scales(
    folder: Path, infos: Mapping[str, TensorInfo], fmt: QuantizationFormat | None
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors by name with scales folded into their weights, and the scale's name for each quantized weight."""
    if fmt is None:
        return dict(infos), {}
    tensors: dict[str, TensorInfo] = {}
    scales: dict[str, str] = {}
    for name, info in infos.items():
        if info.dtype == fmt.dtype:
            scales[name] = _scale_of(folder, infos, name, fmt)
            nbytes = info.nbytes + infos[scales[name]].nbytes
            tensors[name] = TensorInfo(info.shape, fmt.scheme(), info.dtype, nbytes)
        elif name.rpartition(".")[2] not in _SCALE_SUFFIXES:
            tensors[name] = info
    return tensors, scales


def _scale_of(folder: Path, infos: Mapping[str, TensorInfo], weight: str, fmt: QuantizationFormat) -> str:
    name = weight.removesuffix("weight") + fmt.scale_suffix
    if name not in infos:
        raise ModelLoadError(f"{folder}: quantized tensor {weight} has no {name}; fetch the complete model")
    wanted, got = fmt.scale_shape(infos[weight].shape), infos[name].shape
    if wanted[0] * wanted[1] != math.prod(got):
        raise ModelLoadError(f"{folder}: {name} has shape {got}, {fmt.scheme()} needs {wanted}; fetch the model again")
    return name
