"""The level of instructions in use, and the threads."""

from __future__ import annotations

from core_cpu import _kernels
from core_cpu.kernels.arguments import require

__all__ = ["isa", "isa_levels", "num_threads", "rounds_attention", "set_num_threads"]


def isa() -> str:
    """Name of the instruction-set level in use."""
    return _kernels.isa()


def isa_levels() -> list[str]:
    """Levels that this build and this machine share, from low to high."""
    return _kernels.isa_levels()


def rounds_attention() -> bool:
    """Whether attention in bfloat16 can round to int16 at the level in use."""
    return _kernels.rounds_attention()


def num_threads() -> int:
    """Threads that a kernel may use."""
    return _kernels.num_threads()


def set_num_threads(count: int) -> None:
    """Threads of later calls; 0 takes what the runtime says."""
    require(count >= 0, f"the number of threads must be at least 0, got {count}")
    _kernels.set_num_threads(count)
