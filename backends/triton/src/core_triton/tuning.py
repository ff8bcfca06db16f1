"""Tuning as data: block sizes, warps and stages of a kernel by target and shape class, from `tuning/*.toml`.

A file has a table for `any` target, for a driver family ("cuda", "hip") and for single architectures ("sm_90"); each
holds one table a shape class. The most specific one that has the class counts, whole: nothing is merged inside it.
A table `interpreted` counts before all others where kernels run in the interpreter: its tests are small.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from core_triton.target import Target

__all__ = ["Tuning", "tunings"]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a kernel is launched for one target and shape class.

    Args:
        sizes: `tl.constexpr` arguments by name, block sizes foremost, and whole numbers that the launch itself reads.
        num_warps: Warps of a program.
        num_stages: Depth of the software pipeline.
    """

    sizes: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]


def tunings(kernel: str, target: Target) -> dict[str, Tuning]:
    """Shape class to tuning of the file `tuning/<kernel>.toml` for that target."""
    tables = ("any", target.family, target.arch, *(("interpreted",) if target.interpreted else ()))
    return _tunings(kernel, tables)


@functools.cache
def _tunings(kernel: str, tables: tuple[str, ...]) -> dict[str, Tuning]:
    file = _load(kernel)
    classes: dict[str, Any] = {}
    for table in tables:
        classes |= file.get(table, {})
    assert classes, f"tuning/{kernel}.toml has nothing for {tables[-1]}"
    return {name: _tuning(entry) for name, entry in classes.items()}


def _tuning(entry: Mapping[str, int]) -> Tuning:
    launch = ("num_warps", "num_stages")
    sizes = {name: value for name, value in entry.items() if name not in launch}
    return Tuning(sizes=sizes, **{name: entry[name] for name in launch if name in entry})


@functools.cache
def _load(kernel: str) -> dict[str, Any]:
    text = resources.files("core_triton").joinpath("tuning", f"{kernel}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
