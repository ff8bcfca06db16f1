"""How much a vendor wrote: lines of Python in the package that brings a backend."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from core.spec import BackendInfo

__all__ = ["count_lines", "vendor_lines"]


def count_lines(text: str) -> int:
    """Lines that are neither blank nor a comment alone; docstrings count."""
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in text.splitlines())


def vendor_lines(info: BackendInfo) -> int:
    """Lines of every Python file in the import package that `info.load` names; what it is compiled from is not there.

    A count that the vendor can repeat, and that a longer docstring makes no smaller.
    """
    package = info.load.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    files = {path for folder in folders for path in folder.rglob("*.py")}
    if spec and spec.origin and not folders:
        files = {Path(spec.origin)}
    return sum(count_lines(path.read_text(encoding="utf-8")) for path in files)
