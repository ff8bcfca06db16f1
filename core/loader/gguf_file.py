"""One GGUF file: its metadata and where its tensors lie, all checked against the file's length before any is read.

A reader of our own, since the one of the `gguf` package makes several array objects for each vocabulary entry: twelve
seconds for a vocabulary of 262,144 where this takes under one.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from core.backend.schemes import GGUF_BLOCKS
from core.errors import ModelLoadError
from core.spec import DType

__all__ = ["GgufFile", "GgufTensor"]

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
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
        if path.stat().st_size < 24:
            raise ModelLoadError(f"{path} holds {path.stat().st_size} bytes and is no GGUF file; fetch it again")
        # Copy-on-write: torch asks for writable memory, and nothing reaches the file.
        mapped = np.memmap(path, dtype=np.uint8, mode="c")
        self._tensor: Tensor | None = torch.from_numpy(mapped)
        cursor = _Cursor(path, mapped.data)
        self.version, num_tensors, num_keys = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_keys)
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


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> int:
        """Move on by `num_bytes` and return where they begin."""
        begin = self.at
        if num_bytes > len(self.data) - begin:
            raise ModelLoadError(
                f"{self.path} is cut short: {num_bytes} bytes wanted at {begin} and the file ends at {len(self.data)}; "
                "fetch it again"
            )
        self.at = begin + num_bytes
        return begin

    def scalar(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        num_bytes = self.scalar("Q")
        begin = self.take(num_bytes)
        return str(self.data[begin : begin + num_bytes], "utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path}: metadata of unknown type {kind} before byte {self.at}; fetch it again")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            begin = self.take(count * struct.calcsize(_SCALARS[kind]))
            return list(struct.unpack_from(layout, self.data, begin))
        if kind == _ARRAY:
            raise ModelLoadError(
                f"{self.path}: an array of arrays before byte {self.at} cannot be read; convert the file"
            )
        return [self.value(kind) for _ in range(count)]


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    magic = bytes(cursor.data[cursor.take(4) : 4])
    if magic != b"GGUF":
        raise ModelLoadError(f"{cursor.path} begins with {magic!r} instead of b'GGUF'; give a GGUF file")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelLoadError(
            f"{cursor.path} is GGUF of version {version} (or big-endian); versions {_VERSIONS} can be read: convert it"
        )
    return version, cursor.scalar("Q"), cursor.scalar("Q")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise ModelLoadError(f"{cursor.path}: metadata key {key!r} occurs twice; fetch the file again")
        metadata[key] = cursor.value(cursor.scalar("I"))
    return metadata


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    found = [_read_tensor(cursor) for _ in range(count)]
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in found:
        if name in tensors:
            raise ModelLoadError(f"{cursor.path}: tensor {name!r} occurs twice; fetch the file again")
        tensors[name] = _place(cursor, name, shape, kind, base + offset)
    return tensors


def _read_tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int]:
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


def _place(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: str, offset: int) -> GgufTensor:
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
