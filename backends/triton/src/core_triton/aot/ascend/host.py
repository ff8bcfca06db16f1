"""Runs lowered IR on the host: bishengir-opt to LLVM's dialect, mlir-translate, and llvmlite's just-in-time compiler.

What is tested so is the lowering up to linalg. The scheduling, synchronisation and memory plan of HIVM come later.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from core.errors import CoreError
from core_triton.aot.ascend.lowering import to_linalg, tool

__all__ = ["HostKernel", "missing"]

_PASSES = (
    "--execution-engine-convert-hfusion-to-upstream",
    "--execution-engine-convert-hivm-to-upstream",
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--arith-expand=include-bf16=true",
    "--convert-scf-to-cf",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-cf-to-llvm",
    "--convert-math-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
_WORKSPACE_BYTES = 1 << 20

_COPY = r"""
#include <stdint.h>
#include <string.h>
/* memref.copy between two unranked memrefs, as MLIR's C runner utilities declare it. */
struct memref { char *allocated, *aligned; int64_t offset, extents[]; };
struct unranked { int64_t rank; struct memref *of; };
static void copy(int64_t rank, int64_t bytes, char *from, char *to, const int64_t *sizes, const int64_t *from_strides,
                 const int64_t *to_strides) {
  if (rank == 0) { memcpy(to, from, bytes); return; }
  for (int64_t i = 0; i < sizes[0]; i++)
    copy(rank - 1, bytes, from + i * from_strides[0] * bytes, to + i * to_strides[0] * bytes, sizes + 1,
         from_strides + 1, to_strides + 1);
}
void memrefCopy(int64_t bytes, struct unranked *from, struct unranked *to) {
  int64_t rank = from->rank;
  for (int64_t i = 0; i < rank; i++) if (from->of->extents[i] == 0) return;
  copy(rank, bytes, from->of->aligned + from->of->offset * bytes, to->of->aligned + to->of->offset * bytes,
       from->of->extents, from->of->extents + rank, to->of->extents + rank);
}
"""


def _translator() -> str:
    for name in ("mlir-translate-19", "/usr/lib/llvm-19/bin/mlir-translate", "mlir-translate"):
        if shutil.which(name):
            return name
    return ""


def missing() -> str:
    """What is lacking to run lowered IR, and what to do; empty where nothing is."""
    return "" if _translator() else "mlir-translate of LLVM 19 is not here: apt-get install mlir-19-tools"


@cache
def _machine() -> Any:
    """llvmlite, with the host's target and the one function of a runtime that lowered IR calls."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    folder = Path(tempfile.mkdtemp(prefix="memref-"))
    (folder / "copy.c").write_text(_COPY, encoding="utf-8")
    library = str(folder / "copy.so")
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, str(folder / "copy.c")], check=True)
    llvm.load_library_permanently(library)
    return llvm


class HostKernel:
    """A Triton kernel, lowered for Ascend and compiled for the host.

    Args:
        kernel: The `triton.jit` function.
        signature: Triton types of the run-time arguments, in the kernel's order.
        constexprs: Values of the others.

    Raises:
        CoreError: a tool of the chain refuses it.
    """

    def __init__(self, kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]) -> None:
        llvm = _machine()
        module = llvm.parse_assembly(_llvm_ir(to_linalg(kernel, signature, constexprs)))
        module.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(module, passes)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        self._types = [signature[name] for name in kernel.arg_names if name in signature]
        self._address = self._engine.get_function_address(kernel.__name__)

    def __call__(self, grid: Sequence[int], *args: Any) -> None:
        """One launch: every program of the grid, one after the other.

        Args:
            grid: Up to three numbers.
            args: Tensors, contiguous in what the kernel reads of them, and numbers, in the kernel's order.
        """
        kinds: list[Any] = []
        values: list[Any] = []

        def memory(tensor: torch.Tensor) -> None:
            # A ranked memref of one dim: allocated, aligned, offset, size, stride.
            kinds.extend([ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64])
            values.extend([tensor.data_ptr(), tensor.data_ptr(), 0, tensor.untyped_storage().nbytes(), 1])

        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8)
        memory(workspace)
        memory(workspace)
        for kind, value in zip(self._types, args, strict=True):
            if kind.startswith("*"):
                memory(value)
            else:
                kinds.append(ctypes.c_float if kind.startswith("fp") else ctypes.c_int32)
                values.append(value)
        function = ctypes.CFUNCTYPE(None, *kinds, *[ctypes.c_int32] * 6)(self._address)
        across, down, deep = (*grid, 1, 1)[:3]
        for z in range(deep):
            for y in range(down):
                for x in range(across):
                    function(*values, across, down, deep, x, y, z)


def _llvm_ir(linalg: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.mlir"
        # Marks are hints for HIVM's passes, and the host's know no such dialect.
        place.write_text(re.sub(r"^\s*annotation\.mark .*\n", "", linalg, flags=re.MULTILINE), encoding="utf-8")
        lowered = Path(folder) / "kernel.llvm.mlir"
        _run([str(tool("bishengir-opt")), str(place), *_PASSES, "-o", str(lowered)])
        return _run([_translator(), "--mlir-to-llvmir", str(lowered)])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        told = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise CoreError(f"{Path(command[0]).name} refuses the lowered kernel: {told.strip()[:300]}")
    return done.stdout
