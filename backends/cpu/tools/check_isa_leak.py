# ruff: noqa: T201
"""Fails where an object file of one instruction-set level defines a symbol that the linker could merge with others.

    python tools/check_isa_leak.py BUILD_FOLDER

A weak or unique symbol there (an inline function, a template instance) might be chosen for the whole module and then
run on a machine without the level's instructions. Each isa_*.o may define one global symbol: its table.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def defined(path: Path) -> list[tuple[str, str]]:
    """(type letter, demangled name) of the symbols that an object file defines and others can see."""
    lines = subprocess.run(["nm", "-C", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    symbols = [line.split(maxsplit=2)[1:] for line in lines.splitlines()]
    return [(kind, name) for kind, name in symbols if kind.isupper() or kind in "uvw"]


def main() -> int:
    objects = sorted(Path(sys.argv[1]).rglob("isa_*.cpp.o"))
    if not objects:
        print(f"no isa_*.cpp.o below {sys.argv[1]}; give the build folder")
        return 2
    bad = 0
    for path in objects:
        level = path.name.removesuffix(".cpp.o")
        for kind, name in defined(path):
            if name != f"core_cpu::{level}::table":
                print(f"{path.name}: {kind} {name}")
                bad += 1
    print(f"{len(objects)} objects, {bad} symbols that could be merged")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
