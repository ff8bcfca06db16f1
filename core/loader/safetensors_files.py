"""Finding all safetensors files of a folder and proving them complete, before a single tensor is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from core.errors import ModelLoadError
from core.loader.tensor_info import TensorInfo
from core.spec import DType

__all__ = ["SafetensorsFiles", "read_json"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_DTYPES = {
    "F64": DType.FLOAT64,
    "F32": DType.FLOAT32,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "F8_E8M0": DType.FLOAT8_E8M0FNU,
    "I64": DType.INT64,
    "I32": DType.INT32,
    "I8": DType.INT8,
    "U8": DType.UINT8,
    "BOOL": DType.BOOL,
}


@dataclass(slots=True)
class SafetensorsFiles:
    """The opened shards of a checkpoint.

    Args:
        handles: An open file for each tensor name.
        infos: Shape and dtype of each tensor, in the order of files.
        stack: Closes the files.
    """

    handles: dict[str, Any]
    infos: dict[str, TensorInfo]
    stack: ExitStack

    @classmethod
    def open(cls, folder: Path) -> SafetensorsFiles:
        """Opens all shards of a folder.

        Raises:
            ModelLoadError: A file is missing or damaged, or files and index disagree.
        """
        shards, indexed = _find_shards(folder)
        files = cls({}, {}, ExitStack())
        try:
            owner: dict[str, str] = {}
            for shard in shards:
                files._add(shard, owner)
            _check_index(folder, indexed, owner)
        except BaseException:
            files.stack.close()
            raise
        return files

    def _add(self, shard: Path, owner: dict[str, str]) -> None:
        try:
            handle = self.stack.enter_context(safe_open(shard, framework="pt"))
            names = list(handle.keys())
            infos = {name: _tensor_info(shard, name, handle.get_slice(name)) for name in names}
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{shard} is damaged or cut short ({error}); fetch it again") from error
        for name in names:
            if name in owner:
                raise ModelLoadError(f"tensor {name} is in {owner[name]} and in {shard.name}; keep one of the files")
            owner[name] = shard.name
            self.handles[name] = handle
        self.infos.update(infos)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelLoadError: It is missing, no JSON, no object, or has a key twice.
    """
    try:
        value = json.loads(path.read_text("utf-8"), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path.parent} has no {path.name}; fetch the complete model") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is no readable JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a {type(value).__name__} instead of an object; fetch it again")
    return value


def _unique(path: Path, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ModelLoadError(f"{path} has {', '.join(twice)} twice; fetch it again")
    return result


def _find_shards(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Files to open, all of them present, and the index (tensor -> file) where there is one."""
    if (folder / _INDEX).is_file():
        indexed = _read_index(folder / _INDEX)
        names = sorted(set(indexed.values()))
    else:
        indexed = None
        names = _names_without_index(folder)
    _require(folder, names)
    return [folder / name for name in names], indexed


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path} has no weight_map; fetch it again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelLoadError(
                f"{path} puts tensor {tensor} into {name!r}, which is no file of this folder; fetch it again"
            )
    return weight_map


def _names_without_index(folder: Path) -> list[str]:
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    matches = [match for name in present if (match := _SHARD.fullmatch(name))]
    if not matches:
        return present
    families = {(match[1], match[3]) for match in matches}
    return sorted(
        f"{stem}-{index:05d}-of-{count}.safetensors" for stem, count in families for index in range(1, int(count) + 1)
    )


def _require(folder: Path, names: Iterable[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks {len(missing)} of its weight files: {', '.join(missing)}; fetch the missing files"
        )


def _check_index(folder: Path, indexed: dict[str, str] | None, owner: dict[str, str]) -> None:
    if indexed is None:
        return
    wrong = [f"{tensor} ({name})" for tensor, name in indexed.items() if owner.get(tensor) != name]
    if wrong:
        raise ModelLoadError(
            f"{folder}: the index names {len(wrong)} tensors that are not in their files: {', '.join(wrong[:8])}; "
            "index and files are of different versions: fetch the model again"
        )


def _tensor_info(shard: Path, name: str, view: Any) -> TensorInfo:
    kind, shape = view.get_dtype(), tuple(view.get_shape())
    if kind not in _DTYPES:
        raise ModelLoadError(f"{shard}: tensor {name} is of type {kind}; supported are {', '.join(_DTYPES)}")
    dtype = _DTYPES[kind]
    return TensorInfo(shape, "none", dtype.value, math.prod(shape) * dtype.itemsize)
