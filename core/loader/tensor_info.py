"""What every checkpoint offers, whatever its files."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from core.errors import ModelLoadError
from core.loader.quantized import QuantizedTensor

__all__ = ["Checkpoint", "TensorInfo"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, before it is read.

    Args:
        shape: In elements; a weight is (out, in).
        scheme: How it is stored: "none" for dense numbers, else a name in `core.backend.SCHEMES`.
        dtype: Type of its elements in the file, as torch spells it; "uint8" for blocks.
        nbytes: Bytes in the file, scales included.
    """

    shape: tuple[int, ...]
    scheme: str
    dtype: str
    nbytes: int


class Checkpoint(ABC):
    """The weights of one model on disk, by Hugging Face names, complete: that was checked on opening.

    Args:
        path: Folder or file.
        config: In the terms of config.json, whatever the format; `dtype` is always there.
        generation_config: In the terms of generation_config.json; may be empty.
        tensors: All tensors by name.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], generation_config: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self._tensors = tensors

    @property
    def architecture(self) -> str:
        """The model's class name, such as "LlamaForCausalLM"."""
        return str(self.config["architectures"][0])

    def names(self) -> tuple[str, ...]:
        """Names of all tensors. One that the format's naming does not know keeps the name it has in the file."""
        return tuple(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Shape and scheme of a tensor, without reading it.

        Raises:
            ModelLoadError: The checkpoint has no such tensor; the message names similar ones.
        """
        if name not in self._tensors:
            similar = difflib.get_close_matches(name, self._tensors, n=3)
            hint = f"; similar: {', '.join(similar)}" if similar else ""
            raise ModelLoadError(f"{self.path} has no tensor {name}{hint}; use a checkpoint of {self.architecture}")
        return self._tensors[name]

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """A tensor as dense numbers: as stored, float32 where it was quantized. Read-only; may be a mapped view."""

    @abstractmethod
    def load_quantized(self, name: str) -> QuantizedTensor | None:
        """A weight as stored, read-only; None where it is dense."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Tensors already loaded stay valid."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
