"""`python -m core_triton.roofline`: a file of expected times for each operation and chip."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import CoreError
from core_triton.roofline.chips import CHIPS, Chip, chip_named
from core_triton.roofline.shapes import OPERATIONS, STEPS
from core_triton.roofline.times import expected

__all__ = ["main", "rows"]


def rows(name: str, chip: Chip) -> Iterator[dict[str, Any]]:
    """One entry of the file of an operation and chip for each step."""
    for step, sizes in STEPS.items():
        found = expected(OPERATIONS[name], sizes, chip)
        yield {
            "step": step,
            "tokens": sizes.tokens,
            "requests": sizes.requests,
            "context": sizes.context,
            "bytes_read": round(found.cost.read_bytes),
            "bytes_written": round(found.cost.written_bytes),
            "operations": round(found.cost.operations),
            "dtype": found.cost.dtype.value,
            "memory_us": round(found.memory_s * 1e6, 4),
            "matrix_us": round(found.matrix_s * 1e6, 4),
            "expected_us": round(found.seconds * 1e6, 4),
            "bound": found.bound,
        }


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m core_triton.roofline",
        description="Bytes, operations and the least time of each operation on each chip, from published figures.",
        epilog="Nothing is measured here. Exit code 2: there is no such chip.",
    )
    parser.add_argument("--chip", action="append", metavar="NAME", help=f"of {', '.join(CHIPS)}; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/CHIP/OPERATION.json instead of printing")
    arguments = parser.parse_args(argv)
    try:
        chips = [chip_named(name) for name in arguments.chip or CHIPS]
    except CoreError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if arguments.out is not None:
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            sys.stderr.write(f"--out {str(arguments.out)!r} cannot be made: {error.strerror}; give another folder\n")
            return 2
    for chip in chips:
        for name, op in OPERATIONS.items():
            found = list(rows(name, chip))
            if arguments.out is None:
                _print(chip, name, found)
                continue
            place = arguments.out / chip.name / f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}.json"
            place.parent.mkdir(parents=True, exist_ok=True)
            head = {"operation": name, "spec": op.to_dict(), "chip": chip.name, "source": chip.source}
            place.write_text(json.dumps({**head, "steps": found}, indent=1) + "\n", encoding="utf-8")
    return 0


def _print(chip: Chip, name: str, found: list[dict[str, Any]]) -> None:
    for row in found:
        size = f"{(row['bytes_read'] + row['bytes_written']) / 1e6:.3f} MB, {row['operations'] / 1e9:.3f} Gop"
        sys.stdout.write(f"{chip.name}: {name}, {row['step']}: {row['expected_us']:.2f} us ({row['bound']}; {size})\n")


if __name__ == "__main__":
    sys.exit(main())
