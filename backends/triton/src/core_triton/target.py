"""Targets: the chips that the kernels are built for, as far as a kernel has to know them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from core.spec import DType

__all__ = ["TARGETS", "Target", "interpreted"]

_E4M3FN, _E4M3FNUZ = DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ


@dataclass(frozen=True, kw_only=True)
class Target:
    """One architecture.

    Args:
        arch: The vendor's word: "sm_90", "gfx942".
        family: Triton's word for the driver: "cuda" or "hip".
        warp_size: Threads that run in step.
        shared_bytes: Shared memory (LDS) that one program may have.
        fp8: Formats that the matrix unit multiplies; empty where it has no 8-bit floats.
        interpreted: Whether kernels run in the interpreter, on host tensors, instead of on the chip.
    """

    arch: str
    family: Literal["cuda", "hip"]
    warp_size: int
    shared_bytes: int
    fp8: frozenset[DType] = frozenset()
    interpreted: bool = False

    @property
    def fp8_dtype(self) -> DType | None:
        """The e4m3 format that this chip multiplies; None where it has none."""
        for dtype in (_E4M3FN, _E4M3FNUZ):
            if dtype in self.fp8:
                return dtype
        return None


def _cuda(arch: str, shared_kib: int, fp8: bool) -> Target:
    formats = frozenset({_E4M3FN}) if fp8 else frozenset()
    return Target(arch=arch, family="cuda", warp_size=32, shared_bytes=shared_kib * 1024, fp8=formats)


def _hip(arch: str, warp_size: int, lds_kib: int, fp8: DType | None) -> Target:
    formats = frozenset({fp8}) if fp8 else frozenset()
    return Target(arch=arch, family="hip", warp_size=warp_size, shared_bytes=lds_kib * 1024, fp8=formats)


TARGETS: dict[str, Target] = {
    target.arch: target
    for target in (
        _cuda("sm_80", 163, False),
        _cuda("sm_86", 99, False),
        _cuda("sm_89", 99, True),
        _cuda("sm_90", 227, True),
        _cuda("sm_100", 227, True),
        _cuda("sm_120", 99, True),
        _hip("gfx90a", 64, 64, None),
        _hip("gfx942", 64, 64, _E4M3FNUZ),
        _hip("gfx950", 64, 160, _E4M3FN),
        _hip("gfx1100", 32, 64, None),
        _hip("gfx1201", 32, 64, None),
    )
}
"""Every chip that the kernels are built for, by its word. 1201 multiplies 8-bit floats, but spills on it: left out."""


def interpreted(arch: str) -> Target:
    """The stand-in for a chip: the same refusals and tuning, kernels in the interpreter."""
    return replace(TARGETS[arch], interpreted=True)
