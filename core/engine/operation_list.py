"""Lists of operations in a file: what a model that this core has no file for would ask of a device."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from core.backend.ops import OPERATIONS, OpSpec
from core.errors import ConfigError
from core.spec import DType

__all__ = ["OperationList", "read_operations"]


@dataclass(frozen=True, kw_only=True)
class OperationList:
    """Operations with their static parameters.

    Args:
        title: What asks for them, for people.
        dtype: Of the activations, where an operation says nothing else.
        operations: In the order of the file.
    """

    title: str
    dtype: DType
    operations: tuple[OpSpec, ...]


def read_operations(path: Path) -> OperationList:
    """Reads a TOML file: `title`, `dtype`, and a table `[[operations]]` each with `op` and the fields of its OpSpec.

    Raises:
        ConfigError: the file cannot be read, or an entry is no operation; names the entry.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--ops {str(path)!r} cannot be read: {error.strerror}; check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ops {str(path)!r} is no TOML: {error}; see `core doctor` in docs/cli.md") from None
    unknown = sorted(raw.keys() - {"title", "dtype", "operations"})
    if unknown or not isinstance(raw.get("title", ""), str):
        wrong = f"has no {', '.join(unknown)}" if unknown else "has a title that is no string"
        raise ConfigError(f"--ops {str(path)!r} {wrong}; it holds title, dtype and [[operations]]")
    entries = raw.get("operations")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"--ops {str(path)!r} has no [[operations]]; give at least one table, each with op = NAME")
    known = ", ".join(dtype.value for dtype in DType)
    try:
        dtype = DType(raw.get("dtype", "bfloat16"))
    except ValueError:
        raise ConfigError(f"--ops {str(path)!r}: dtype {raw['dtype']!r} is unknown; write one of {known}") from None
    operations = tuple(_operation(entry, dtype, number) for number, entry in enumerate(entries, 1))
    return OperationList(title=raw.get("title", path.stem), dtype=dtype, operations=operations)


def _operation(entry: Mapping[str, Any], dtype: DType, number: int) -> OpSpec:
    name = entry.get("op")
    kind = OPERATIONS.get(str(name))
    if kind is None:
        wrong = "has no op" if name is None else f"op = {name!r} is none"
        raise ConfigError(f"operation {number} of --ops: {wrong}; known are {', '.join(sorted(OPERATIONS))}")
    fields = {field.name for field in dataclasses.fields(kind)}
    unknown = sorted(entry.keys() - fields - {"op"})
    if unknown:
        raise ConfigError(
            f"operation {number} of --ops ({name}) has no {', '.join(unknown)}; its fields are "
            f"{', '.join(sorted(fields))}"
        )
    values = {"dtype": dtype.value, **{key: value for key, value in entry.items() if key != "op"}}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"operation {number} of --ops ({name}): {error}; see docs/interface.md") from None
