"""Opening a model's weights, whatever their format."""

from __future__ import annotations

from pathlib import Path

from core.errors import ModelLoadError, ModelNotFoundError
from core.loader.gguf_checkpoint import GgufCheckpoint, split_files
from core.loader.quantized import QuantizedTensor
from core.loader.safetensors_checkpoint import SafetensorsCheckpoint
from core.loader.tensor_info import Checkpoint, TensorInfo

__all__ = ["Checkpoint", "QuantizedTensor", "TensorInfo", "open_checkpoint"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(path: Path) -> Checkpoint:
    """The model's weights, proved complete; nothing is read yet. The caller closes it.

    Args:
        path: A folder with safetensors files or one GGUF model, or a GGUF file.

    Raises:
        ModelNotFoundError: There is nothing at the path.
        ModelLoadError: Files are missing (all are named), damaged, or of a format that is not read.
    """
    if path.is_file():
        return _open_file(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"no model at {path}; give a folder or a GGUF file, or see `core pull`")
    if (path / "model.safetensors.index.json").is_file() or any(path.glob("*.safetensors")):
        return SafetensorsCheckpoint(path)
    models = {split_files(file)[0] for file in path.glob("*.gguf")}
    if len(models) > 1:
        names = ", ".join(sorted(model.name for model in models))
        raise ModelLoadError(f"{path} holds {len(models)} GGUF models ({names}); give the path of one")
    if models:
        return GgufCheckpoint(models.pop())
    raise _no_weights(path)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in _PICKLES:
        raise _pickle_error(path.name)
    if path.suffix == ".safetensors":
        raise ModelLoadError(f"{path} is one file of a model; give its folder, {path.parent}")
    return GgufCheckpoint(path)


def _no_weights(folder: Path) -> ModelLoadError:
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        return _pickle_error(", ".join(pickles))
    return ModelLoadError(
        f"{folder} holds no weight files: model.safetensors, model.safetensors.index.json with its shards, or a .gguf "
        "file is needed; fetch the model again"
    )


def _pickle_error(names: str) -> ModelLoadError:
    return ModelLoadError(
        f"{names}: pickled weights can run code when they are read and are refused; convert them to safetensors"
    )
