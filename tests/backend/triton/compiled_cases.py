"""Kernels that a gate must catch, compiled where Triton compiles: `python compiled_cases.py` prints what was found."""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl

from core_triton import registry
from core_triton.aot.compiling import Job, compile_job
from core_triton.aot.gates import judge
from core_triton.registry import Build, Kernel


@triton.jit
def product(a, b, out, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MATRIX: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a + rows * K + k + inner[None, :])
        right = tl.load(b + columns * K + k + inner[:, None])
        if MATRIX:
            acc += tl.dot(left, right)
        else:
            acc += left.to(tl.float32) * tl.sum(right.to(tl.float32), 0)[None, :]
    tl.store(out + rows * BLOCK_N + columns, acc)


@triton.jit
def refused(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at) + tl.arange(0, 2 * n))


POINTERS = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"}


def tile(label: str, size: int, *, depth: int = 32, stages: int = 2, warps: int = 4, matrix: bool = True) -> Build:
    return Build(
        kernel=product,
        label=label,
        signature=POINTERS,
        constexprs={"BLOCK_M": size, "BLOCK_N": size, "BLOCK_K": size if not matrix else depth, "MATRIX": matrix},
        num_warps=warps,
        num_stages=stages,
        matrix=True,
        divisible=("a", "b", "out", "K"),
    )


BUILDS = [
    tile("right", 64),
    tile("spilling", 256, warps=1),
    tile("too large", 128, depth=128, stages=5),
    tile("no instruction", 32, matrix=False),
    Build(kernel=refused, label="refused", signature={"x": "*fp32", "out": "*fp32"}, constexprs={"n": 64}),
]


def main() -> None:
    registry.register(
        "toy", Kernel(refuse=lambda op, target: "", bind=lambda op, target: print, builds=lambda t: BUILDS)
    )
    jobs = [Job("toy", build.label, arch) for arch in sys.argv[1:] for build in BUILDS]
    results = [compile_job(job) for job in jobs]
    findings, _, _ = judge(results, [], complete=True)
    right = [found.resources for found in results if found.job.label == "right"]
    print(json.dumps([[f.compiled.job.arch, f.compiled.job.label, f.gate, f.reason] for f in findings]))
    print(json.dumps([found.matrix for found in right if found is not None]))


if __name__ == "__main__":
    main()
