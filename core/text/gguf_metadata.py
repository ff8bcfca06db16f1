"""Key-value metadata of a GGUF file, read without touching its tensors.

Layout: the GGUF specification, versions 2 and 3 (header, counts, then key, type, value for each entry).
The reader of the `gguf` package makes one array object for each string, which takes seconds for a vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError, ModelNotFoundError

__all__ = ["read_gguf_metadata"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_VERSIONS = (2, 3)


class _Cursor:
    """A position in the mapped file; every read moves it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0
        self.order = "<"

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        values = struct.unpack_from(f"{self.order}{count}{code}", self.data, self.offset)
        self.offset += struct.calcsize(f"{self.order}{count}{code}")
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise struct.error("a string runs past the end of the file")
        return self.data[start : self.offset].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.unpack(_SCALARS[kind])[0]

    def array(self) -> list[Any]:
        kind, count = self.unpack("I")[0], self.unpack("Q")[0]
        if count > len(self.data):
            raise struct.error("an array is longer than the file")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        return list(self.unpack(_SCALARS[kind], count))

    def strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary has up to several hundred thousand entries.
        data, offset, read = self.data, self.offset, struct.Struct(f"{self.order}Q").unpack_from
        out = []
        for _ in range(count):
            start = offset + 8
            offset = start + read(data, offset)[0]
            out.append(data[start:offset].decode("utf-8", "replace"))
        if offset > len(data):
            raise struct.error("a string runs past the end of the file")
        self.offset = offset
        return out


def _read_entries(cursor: _Cursor, wanted: Callable[[str], bool]) -> dict[str, Any]:
    if cursor.data[:4] != b"GGUF":
        raise ValueError("it does not begin with the letters GGUF")
    cursor.offset = 4
    (version,) = cursor.unpack("I")
    if version & 0xFFFF == 0:
        cursor.order = ">"
        version = int.from_bytes(cursor.data[4:8], "big")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}, known are {_VERSIONS}")
    _, num_entries = cursor.unpack("Q", 2)
    entries = {}
    for _ in range(num_entries):
        key = cursor.string()
        (kind,) = cursor.unpack("I")
        value = cursor.value(kind)
        if wanted(key):
            entries[key] = value
    return entries


def read_gguf_metadata(path: str | Path, prefix: str = "") -> dict[str, Any]:
    """Metadata entries whose key begins with `prefix`, as plain Python values (arrays as lists).

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: the file is not a whole GGUF file of version 2 or 3.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {str(path)!r}; give the path of a .gguf file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_entries(_Cursor(data), lambda key: key.startswith(prefix))
    except (ValueError, KeyError, struct.error) as error:
        raise ModelLoadError(
            f"{str(path)!r} cannot be read as a GGUF file: {error}; download or convert it again"
        ) from error
