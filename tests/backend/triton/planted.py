"""Copies of kernel modules with a fault planted in their source."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["with_fault"]


def with_fault(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """The module anew, from a file in `folder` in which `old` reads `new`."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__file__}"
    file = folder / f"{module.__name__.rsplit('.', 1)[-1]}_with_fault.py"
    file.write_text(source.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
