"""The operations that have a Triton kernel: who refuses, who binds, and what must compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.backend import UnsupportedError, Verdict
from core.backend.ops import OpSpec
from core_triton import interpreter, ops
from core_triton.target import Target

__all__ = ["KERNELS", "Build", "Kernel", "bind", "register", "verdict"]


@dataclass(frozen=True, kw_only=True)
class Build:
    """One compilation of a kernel: what the table of targets lists and the gates judge.

    Args:
        kernel: The `triton.jit` function.
        label: Which case of the operation, for people: "decode bf16 head 128".
        signature: Triton type of each run-time argument by name ("*bf16", "i32", "fp32").
        constexprs: Value of each `tl.constexpr` argument by name.
        num_warps: As tuned for the target.
        num_stages: As tuned for the target.
        matrix: Whether the code must hold a matrix instruction.
        divisible: Arguments whose value or address is a multiple of 16.
    """

    kernel: Any
    label: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    matrix: bool = False
    divisible: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The Triton way of one operation.

    Args:
        refuse: Why this operation cannot be done on such a target; empty where it can.
        bind: Makes the callable of an operation that is not refused; it takes the operation's record.
        builds: Every compilation that the operation may need on the target: all tuning entries.
        verdict: NATIVE with what the kernel asks of the engine; None is plain NATIVE.
    """

    refuse: Callable[[Any, Target], str]
    bind: Callable[[Any, Target], Callable[[Any], Any]]
    builds: Callable[[Target], Sequence[Build]]
    verdict: Callable[[Any, Target], Verdict] | None = None


KERNELS: dict[str, Kernel] = {}
"""By the operation's name; filled by the modules of `core_triton.ops`."""


def register(name: str, kernel: Kernel) -> None:
    """Adds the kernel of operation `name`."""
    assert name not in KERNELS, f"operation {name} has a kernel already"
    KERNELS[name] = kernel


def verdict(op: OpSpec, target: Target) -> Verdict:
    """How these kernels do `op` on `target`. Pure; compiles and imports nothing."""
    ops.load()
    kernel = KERNELS.get(op.name)
    if kernel is None:
        return Verdict.composite("no kernel for it")
    reason = kernel.refuse(op, target)
    if reason:
        return Verdict.composite(reason)
    return Verdict.native() if kernel.verdict is None else kernel.verdict(op, target)


def bind(op: OpSpec, target: Target) -> Callable[[Any], Any]:
    """The callable of an operation whose verdict is NATIVE.

    Raises:
        UnsupportedError: it is not NATIVE.
        BackendUnavailableError: the target is interpreted, and this process cannot interpret.
    """
    answer = verdict(op, target)
    if answer.kind != "NATIVE":
        raise UnsupportedError(op.describe(), f"{target.arch}: {answer.reason}", "ask supports() first")
    if target.interpreted:
        interpreter.install()
    return KERNELS[op.name].bind(op, target)
