"""Header and key-value metadata of a GGUF file: tokenizer and chat template live there. Reads no tensor.

Layout: the GGUF specification, versions 2 and 3 (header, counts, then key, type, value for each entry). A reader of our
own, since the one of the `gguf` package makes several array objects for each vocabulary entry: twelve seconds for a
vocabulary of 262,144 where this takes well under one.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError, ModelNotFoundError

__all__ = [
    "MIN_BYTES",
    "GgufCursor",
    "read_gguf_array_length",
    "read_gguf_metadata",
    "read_header",
    "read_metadata",
]

MIN_BYTES = 24
"""Length of the header: what is shorter is no GGUF file."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GgufCursor:
    """A position in a mapped file that never passes its end.

    Args:
        path: For messages.
        data: The file.
    """

    def __init__(self, path: Path, data: memoryview | mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def take(self, num_bytes: int) -> int:
        """Moves on by `num_bytes` and returns where they begin.

        Raises:
            ModelLoadError: the file ends before.
        """
        begin = self.at
        if num_bytes > len(self.data) - begin:
            raise ModelLoadError(
                f"GGUF file {self.path} is cut short: {num_bytes} bytes wanted at {begin} "
                f"and the file ends at {len(self.data)}; fetch it again"
            )
        self.at = begin + num_bytes
        return begin

    def scalar(self, code: str) -> Any:
        """One number, by its `struct` code."""
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        """A string; bytes that are no UTF-8 become U+FFFD."""
        num_bytes = self.scalar("Q")
        begin = self.take(num_bytes)
        return str(self.data[begin : begin + num_bytes], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A metadata value of the type numbered `kind`; arrays become lists."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def skip(self, kind: int) -> int | None:
        """Passes a value of the type numbered `kind` without making it; the length of an array, else None."""
        if kind != _ARRAY:
            self.value(kind)
            return None
        of, count = self.scalar("I"), self.scalar("Q")
        if of == _STRING:
            data, end, read, at = self.data, len(self.data), struct.Struct("<Q").unpack_from, self.at
            for _ in range(count):
                if at + 8 > end:
                    self.take(end + 1)
                at += 8 + read(data, at)[0]
            self.take(at - self.at)
        else:
            self.take(count * struct.calcsize("<" + self._code(of)))
        return int(count)

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            raise ModelLoadError(
                f"GGUF file {self.path}: an array of arrays before byte {self.at} cannot be read; convert the file"
            )
        code = self._code(kind)
        begin = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self.data, begin))

    def _strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary has up to several hundred thousand entries.
        data, end, read = self.data, len(self.data), struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            begin = self.take(8) + 8
            stop = begin + read(data, begin - 8)[0]
            if stop > end:
                self.take(stop - begin)
            self.at = stop
            out.append(str(data[begin:stop], "utf-8", "replace"))
        return out

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ModelLoadError(
                f"GGUF file {self.path}: metadata of unknown type {kind} before byte {self.at}; fetch it again"
            )
        return _SCALARS[kind]


def read_header(cursor: GgufCursor) -> tuple[int, int, int]:
    """(version, number of tensors, number of metadata entries).

    Raises:
        ModelLoadError: it is no GGUF file, or of a version that is not known.
    """
    if len(cursor.data) < MIN_BYTES:
        raise ModelLoadError(f"{cursor.path} holds {len(cursor.data)} bytes and is no GGUF file; fetch it again")
    magic = bytes(cursor.data[cursor.take(4) : 4])
    if magic != b"GGUF":
        raise ModelLoadError(f"{cursor.path} begins with {magic!r} instead of b'GGUF'; give a GGUF file")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ModelLoadError(
            f"{cursor.path} is GGUF of version {version} (or big-endian); versions {_VERSIONS} can be read: convert it"
        )
    return version, cursor.scalar("Q"), cursor.scalar("Q")


def read_metadata(cursor: GgufCursor, count: int, *, skip_arrays: str | None = None) -> dict[str, Any]:
    """The entries behind the header.

    Args:
        skip_arrays: Arrays whose key begins with it are left out: who reads tensors has no use for a vocabulary.

    Raises:
        ModelLoadError: the file is damaged.
    """
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        if key in metadata:
            raise ModelLoadError(f"GGUF file {cursor.path}: metadata key {key!r} occurs twice; fetch the file again")
        kind = cursor.scalar("I")
        if skip_arrays is not None and kind == _ARRAY and key.startswith(skip_arrays):
            cursor.skip(kind)
        else:
            metadata[key] = cursor.value(kind)
    return metadata


def read_gguf_array_length(path: str | Path, key: str) -> int | None:
    """Number of elements of an array in the metadata, without reading it; None where there is no such array.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: the file is damaged.
    """
    with _mapped(Path(path)) as cursor:
        for _ in range(read_header(cursor)[2]):
            found, kind = cursor.string(), cursor.scalar("I")
            if found == key and kind == _ARRAY:
                cursor.scalar("I")
                return int(cursor.scalar("Q"))
            cursor.skip(kind)
    return None


def read_gguf_metadata(path: str | Path, prefix: str = "") -> dict[str, Any]:
    """Metadata entries whose key begins with `prefix`, as plain Python values (arrays as lists).

    Raises:
        ModelNotFoundError: there is no such file.
        ModelLoadError: the file is not a whole GGUF file of version 2 or 3.
    """
    with _mapped(Path(path)) as cursor:
        _, _, count = read_header(cursor)
        metadata = read_metadata(cursor, count)
    return {key: value for key, value in metadata.items() if key.startswith(prefix)}


@contextmanager
def _mapped(path: Path) -> Iterator[GgufCursor]:
    """A cursor at the beginning of the file."""
    if not path.is_file():
        raise ModelNotFoundError(f"there is no file {str(path)!r}; give the path of a .gguf file")
    if path.stat().st_size < MIN_BYTES:
        raise ModelLoadError(f"{path} holds {path.stat().st_size} bytes and is no GGUF file; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield GgufCursor(path, data)
