"""One GGUF file: its metadata and where its tensors lie, all checked against the file's length before any is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from core.backend.schemes import GGUF_BLOCKS
from core.errors import ModelLoadError
from core.spec import DType
from core.text.gguf_metadata import MIN_BYTES, GgufCursor, read_header, read_metadata

__all__ = ["GgufFile", "GgufTensor"]

_MAX_DIMS = 4
_DENSE = {"f32": DType.FLOAT32, "f16": DType.FLOAT16, "bf16": DType.BFLOAT16}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Args:
        name: Name in the file.
        shape: Elements, rows first: a matrix is (out, in).
        scheme: "none" for dense numbers, else the name of its blocks in `core.backend.SCHEMES`.
        dtype: Type of its elements, as torch spells it; "uint8" for blocks.
        offset: First byte, from the start of the file.
        nbytes: Length in bytes.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str
    dtype: str
    offset: int
    nbytes: int


class GgufFile:
    """A mapped GGUF file.

    Args:
        path: The file.

    Raises:
        ModelLoadError: The file is no GGUF file, of an unknown version, cut short, or holds an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < MIN_BYTES:
            raise ModelLoadError(f"{path} holds {path.stat().st_size} bytes and is no GGUF file; fetch it again")
        # Copy-on-write: torch asks for writable memory, and nothing reaches the file.
        mapped = np.memmap(path, dtype=np.uint8, mode="c")
        self._tensor: Tensor | None = torch.from_numpy(mapped)
        cursor = GgufCursor(path, mapped.data)
        self.version, num_tensors, num_keys = read_header(cursor)
        self.metadata = read_metadata(cursor, num_keys, skip_arrays="tokenizer.")
        self.tensors = _read_tensors(cursor, num_tensors, self._alignment())

    def rows(self, tensor: GgufTensor) -> Tensor:
        """The tensor's bytes, `[rows, bytes_per_row], uint8`, a read-only view of the mapped file."""
        if self._tensor is None:
            raise ModelLoadError(f"{self.path} is closed; open the checkpoint again")
        num_rows = math.prod(tensor.shape[:-1])
        return self._tensor[tensor.offset : tensor.offset + tensor.nbytes].view(num_rows, -1)

    def close(self) -> None:
        """Let go of the mapping; it ends when the last view is gone."""
        self._tensor = None

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", 32)
        if not isinstance(value, int) or value < 8 or value & (value - 1):
            raise ModelLoadError(
                f"{self.path}: general.alignment is {value!r}, not a power of two; fetch the file again"
            )
        return value


def _read_tensors(cursor: GgufCursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    found = [_read_tensor(cursor) for _ in range(count)]
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise ModelLoadError(f"{cursor.path}: tensor {name!r} occurs twice; fetch the file again")
        tensors[name] = _place(cursor, name, shape, kind, base + offset)
    return tensors


def _read_tensor(cursor: GgufCursor) -> tuple[str, tuple[int, ...], str, int]:
    name = cursor.string()
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ModelLoadError(f"{cursor.path}: tensor {name!r} has {num_dims} dimensions; fetch the file again")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    if 0 in shape:
        raise ModelLoadError(f"{cursor.path}: tensor {name!r} of shape {shape} is empty; fetch the file again")
    return name, shape, _type_name(cursor.path, name, cursor.scalar("I")), cursor.scalar("Q")


def _type_name(path: Path, tensor: str, type_id: int) -> str:
    try:
        name = GGMLQuantizationType(type_id).name.lower()
    except ValueError:
        name = f"number {type_id}"
    if name not in _DENSE and name not in GGUF_BLOCKS:
        supported = ", ".join((*_DENSE, *GGUF_BLOCKS))
        raise ModelLoadError(f"{path}: tensor {tensor!r} is of type {name}; supported are {supported}: convert it")
    return name


def _place(cursor: GgufCursor, name: str, shape: tuple[int, ...], kind: str, offset: int) -> GgufTensor:
    dense = _DENSE.get(kind)
    elements, num_bytes = (1, dense.itemsize) if dense is not None else GGUF_BLOCKS[kind][:2]
    if shape[-1] % elements:
        raise ModelLoadError(
            f"{cursor.path}: rows of tensor {name!r} have {shape[-1]} elements, no multiple of {elements} as {kind} "
            "needs; fetch the file again"
        )
    nbytes = math.prod(shape) // elements * num_bytes
    if offset % 8 or offset + nbytes > len(cursor.data):
        raise ModelLoadError(
            f"{cursor.path} is cut short: tensor {name!r} takes bytes [{offset}, {offset + nbytes}) and the file ends "
            f"at {len(cursor.data)}; fetch it again"
        )
    return GgufTensor(name, shape, "none" if dense else kind, (dense or DType.UINT8).value, offset, nbytes)
