"""What machine code says about itself: registers, spills, shared memory, occupancy, and its matrix instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core_triton.target import Target

__all__ = ["Resources", "family_of", "read_amdgcn", "read_cubin"]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """One compiled kernel.

    Args:
        registers: Of a thread: vector registers, accumulation registers included.
        spills: Loads and stores of spilled registers in the code (NVIDIA), or spilled vector registers (AMD).
        stack_bytes: Local memory of a thread, whatever for.
        shared_bytes: Shared memory (LDS) of a program.
        occupancy: Programs that fit on a multiprocessor (NVIDIA), or waves on a SIMD (AMD), by these resources.
        matrix: Matrix instructions found, as the assembler writes them, without duplicates.
        scalar_spills: Scalar registers kept in lanes of vector registers (AMD); no memory is touched.
    """

    registers: int
    spills: int
    stack_bytes: int
    shared_bytes: int
    occupancy: int
    matrix: tuple[str, ...]
    scalar_spills: int = 0


@dataclass(frozen=True)
class _Multiprocessor:
    """Limits of one multiprocessor, from the compute capabilities table of the CUDA C++ programming guide."""

    warps: int
    programs: int
    shared_bytes: int


_KIB = 1024
_MULTIPROCESSORS: Mapping[str, _Multiprocessor] = {
    "sm_80": _Multiprocessor(64, 32, 164 * _KIB),
    "sm_86": _Multiprocessor(48, 16, 100 * _KIB),
    "sm_89": _Multiprocessor(48, 24, 100 * _KIB),
    "sm_90": _Multiprocessor(64, 32, 228 * _KIB),
    "sm_100": _Multiprocessor(64, 32, 228 * _KIB),
    "sm_120": _Multiprocessor(48, 24, 100 * _KIB),
}
_REGISTERS, _REGISTER_UNIT, _RESERVED_SHARED = 65536, 256, _KIB

_FAMILIES = (
    (re.compile(r"UTC\w*MMA"), "tcgen05"),
    (re.compile(r"[HQIB]GMMA"), "wgmma"),
    (re.compile(r"[HQID]MMA|OMMA|BMMA"), "mma"),
    (re.compile(r"v_s?mfma"), "mfma"),
    (re.compile(r"v_s?wmmac?"), "wmma"),
)
_SASS_MATRIX = re.compile(r"\b(UTC[A-Z]*MMA[\w.]*|[A-Z]{1,2}MMA\.[\w.]+)")
_SASS_LOCAL = re.compile(r"\b(?:STL|LDL)\b")
_AMD_MATRIX = re.compile(r"^\s*(v_(?:mfma|smfmac|wmma|swmmac)\w*)", re.MULTILINE)


def family_of(instruction: str) -> str:
    """The kind of matrix instruction: "mma", "wgmma", "tcgen05", "mfma" or "wmma"; "" for none of them."""
    return next((name for pattern, name in _FAMILIES if pattern.match(instruction)), "")


def read_cubin(cubin: bytes, target: Target, *, shared_bytes: int, num_warps: int, tools: Path) -> Resources:
    """Reads a cubin with `cuobjdump`.

    Args:
        cubin: The machine code of one kernel.
        target: What it was compiled for.
        shared_bytes: Dynamic shared memory that the launch will ask for.
        num_warps: Of a program.
        tools: The folder with `cuobjdump` and `nvdisasm`.

    Raises:
        RuntimeError: the tool does not understand the cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.cubin"
        place.write_bytes(cubin)
        usage = _cuobjdump(tools, "-res-usage", place)
        code = _cuobjdump(tools, "-sass", place)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage says nothing about registers: {usage[:200]!r}")
    registers, stack, _, local = map(int, found.groups())
    return Resources(
        registers=registers,
        spills=len(_SASS_LOCAL.findall(code)),
        stack_bytes=stack + local,
        shared_bytes=shared_bytes,
        occupancy=_programs(target.arch, registers, shared_bytes, num_warps),
        matrix=tuple(sorted(set(_SASS_MATRIX.findall(code)))),
    )


def _cuobjdump(tools: Path, flag: str, place: Path) -> str:
    done = subprocess.run([str(tools / "cuobjdump"), flag, str(place)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {flag} failed: {done.stderr.strip()[:200]}")
    return done.stdout


def _programs(arch: str, registers: int, shared_bytes: int, num_warps: int) -> int:
    chip = _MULTIPROCESSORS[arch]
    warp_registers = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // max(1, warp_registers) // num_warps
    by_shared = chip.shared_bytes // (shared_bytes + _RESERVED_SHARED)
    return min(by_registers, by_shared, chip.warps // num_warps, chip.programs)


def read_amdgcn(text: str, *, shared_bytes: int) -> Resources:
    """Reads the assembly text of one kernel, which ends with the compiler's own account.

    Args:
        text: The assembly.
        shared_bytes: LDS that the launch will ask for.
    """

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    waves = re.search(r"; Occupancy:\s*(\d+)", text)
    return Resources(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count"),
        stack_bytes=number("private_segment_fixed_size"),
        shared_bytes=max(shared_bytes, number("group_segment_fixed_size")),
        occupancy=int(waves.group(1)) if waves else 0,
        matrix=tuple(sorted(set(_AMD_MATRIX.findall(text)))),
        scalar_spills=number("sgpr_spill_count"),
    )
