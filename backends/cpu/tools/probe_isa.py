# ruff: noqa: T201
"""Runs some kernels over plain buffers and prints the level and the largest error; needs neither torch nor numpy.

    qemu-x86_64 -cpu Haswell python backends/cpu/tools/probe_isa.py PATH_OF_THE_EXTENSION

An instruction that the processor does not have ends the process with SIGILL, so exit code 0 means that nothing compiled
for a newer machine was run.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import random
import sys
from array import array
from types import ModuleType

F32, INT8, FP8, Q8_0 = 0, 3, 4, 5


def load(path: str) -> ModuleType:
    """The extension alone, without its package."""
    spec = importlib.util.spec_from_file_location("_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def floats(count: int) -> array[float]:
    return array("f", (random.uniform(-1, 1) for _ in range(count)))


def at(buffer: array[float] | array[int]) -> int:
    return buffer.buffer_info()[0]


def linear_error(k: ModuleType, rows: int, n: int, depth: int) -> float:
    """Dense float32 against a sum in double."""
    x, w, y = floats(rows * depth), floats(n * depth), array("f", bytes(4 * rows * n))
    panels = ctypes.create_string_buffer(k.packed_bytes(F32, n, depth) + 64)
    base = ctypes.addressof(panels)
    k.pack(F32, n, depth, at(w), depth * 4, F32, base)
    k.linear(k.Weight(F32, n, depth, base), at(x), F32, rows, depth, at(y), F32, n)
    worst = 0.0
    for r in range(rows):
        for c in range(n):
            exact = math.fsum(x[r * depth + i] * w[c * depth + i] for i in range(depth))
            worst = max(worst, abs(exact - y[r * n + c]))
    return worst


def quantized_error(k: ModuleType, scheme: int, row_bytes: int, n: int, depth: int) -> float:
    """A product with dequantized rows against the product with the quantized ones."""
    raw = array("B", (random.choice((1, 3, 9, 40, 70, 100)) for _ in range(n * row_bytes)))
    scales, sums = array("f", [0.5] * 64), array("i", [0] * 64)
    panels = ctypes.create_string_buffer(k.packed_bytes(scheme, n, depth) + 64)
    k.pack(scheme, n, depth, at(raw), row_bytes, 0, ctypes.addressof(panels), at(sums) if scheme == INT8 else 0)
    with_rows = {"row_scale": at(scales)} if scheme in (INT8, FP8) else {}
    with_sums = {"row_sum": at(sums)} if scheme == INT8 else {}
    weight = k.Weight(scheme, n, depth, ctypes.addressof(panels), **with_rows, **with_sums)
    dense, y = array("f", bytes(4 * n * depth)), array("f", bytes(4 * n))
    k.dequantize(weight, at(dense))
    x = array("f", (random.choice((-1.0, 1.0)) for _ in range(depth)))  # exact in int8 too
    k.linear(weight, at(x), F32, 1, depth, at(y), F32, n)
    exact = [math.fsum(x[i] * dense[c * depth + i] for i in range(depth)) for c in range(n)]
    scale = max(math.fsum(abs(dense[c * depth + i]) for i in range(depth)) for c in range(n))
    return max(abs(a - b) for a, b in zip(exact, y, strict=True)) / scale


def main() -> int:
    random.seed(0)
    k = load(sys.argv[1])
    errors = {
        "f32": max(linear_error(k, rows, 37, 50) for rows in (1, 2, 5, 13)),
        "int8": quantized_error(k, INT8, 64, 20, 64),
        "fp8": quantized_error(k, FP8, 64, 20, 64),
        "q8_0": quantized_error(k, Q8_0, 68, 20, 64),
    }
    print(f"level {k.isa()}; " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    return 0 if max(errors.values()) < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
