"""COMPILED: source and machine code of the TileLang programs for each CUDA target, with what the code says of itself.

`python compile_tilelang.py [--out FOLDER]`, in an environment with tilelang (`nox -s tilelang`). Needs nvcc for the
machine code. Nothing runs. Exit code 1: a program that has to compile does not. 2: tilelang or nvcc is not here.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from core_triton.aot.resources import Resources, family_of, read_cubin
from core_triton.target import TARGETS

ARCHS = {"sm_80": "sm_80", "sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120a"}
"""Target, and nvcc's word for it with every feature of the chip."""
WITHOUT_FP8 = ("sm_80",)


def source_of(program: str, arch: str) -> tuple[str, int, int]:
    """CUDA source, threads of a block, and bytes of dynamic shared memory."""
    from tilelang import tvm
    from tilelang.engine.lower import lower
    from tilelang_programs import PROGRAMS

    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    with target:
        made = lower(PROGRAMS[program](), target=target)
    attributes = next(iter(made.device_mod.functions.values())).attrs
    extents = attributes.get("thread_extent") or {}
    threads = int(extents.get("threadIdx.x", 256))
    shared = int(attributes.get("dyn_shared_memory_buf", 0))
    return str(made.kernel_source), threads, shared


def machine_code(source: str, arch: str) -> bytes:
    """The cubin of CUDA source.

    Raises:
        RuntimeError: nvcc refuses it.
    """
    import tilelang

    root = Path(tilelang.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        place, made = Path(folder) / "kernel.cu", Path(folder) / "kernel.cubin"
        place.write_text(source, encoding="utf-8")
        includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
        flags = ["-cubin", f"-arch={arch}", "-std=c++17", "-O3", "--expt-relaxed-constexpr", *includes]
        done = subprocess.run(["nvcc", *flags, "-o", str(made), str(place)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(next((line for line in done.stderr.splitlines() if "error" in line), "nvcc failed"))
        return made.read_bytes()


def report(program: str, target: str, out: Path | None) -> Resources:
    """Compiles one program for one target and reads its code; keeps both in `out`."""
    import triton

    source, threads, shared = source_of(program, target)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{program}.{target}.cu").write_text(source, encoding="utf-8")
    cubin = machine_code(source, ARCHS[target])
    if out is not None:
        (out / f"{program}.{target}.cubin").write_bytes(cubin)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return read_cubin(cubin, TARGETS[target], shared_bytes=shared, num_warps=threads // 32, tools=tools)


def main() -> int:
    """Prints a table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", help="only these")
    parser.add_argument("--out", type=Path, help="folder for sources and cubins")
    arguments = parser.parse_args()
    lacking = [name for name in ("tilelang", "triton") if importlib.util.find_spec(name) is None]
    lacking += [] if shutil.which("nvcc") else ["nvcc"]
    if lacking:
        sys.stderr.write(f"{', '.join(lacking)} not installed: nox -s tilelang; nvcc comes with a CUDA toolkit\n")
        return 2
    from tilelang_programs import PROGRAMS

    failed = 0
    sys.stdout.write("| program | target | registers | spills | KiB | programs | instruction | s |\n")
    sys.stdout.write("|---" * 8 + "|\n")
    for program in arguments.programs or PROGRAMS:
        for target in ARCHS:
            if program == "fp8_gemm" and target in WITHOUT_FP8:
                continue
            begin = time.perf_counter()
            try:
                found = report(program, target, arguments.out)
            except Exception as error:
                failed += 1
                sys.stdout.write(f"| {program} | {target} | FAILED: {' '.join(str(error).split())[-200:]} |\n")
                continue
            kinds = " ".join(sorted({family_of(name) for name in found.matrix})) or "none"
            figures = f"{found.registers} | {found.spills} | {-(-found.shared_bytes // 1024)} | {found.occupancy}"
            sys.stdout.write(f"| {program} | {target} | {figures} | {kinds} | {time.perf_counter() - begin:.0f} |\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
