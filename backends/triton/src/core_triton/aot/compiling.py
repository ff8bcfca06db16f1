"""One build for one target, from source to what the machine code says, with a cache of the answers."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from core.errors import CoreError
from core_triton import ops, registry
from core_triton.aot.resources import Resources, read_amdgcn, read_cubin
from core_triton.registry import Build
from core_triton.target import TARGETS, Target

__all__ = ["NOT_COMPILED", "Compiled", "Job", "compile_job", "crashed", "jobs", "refusal"]

NOT_COMPILED = "not compiled since it last changed"
_READER = 1
"""Raised when what is read from machine code changes, so that no old answer is taken for a new one."""


@dataclass(frozen=True, order=True)
class Job:
    """One build of one operation for one target, by names alone: it travels between processes.

    Args:
        op: The operation's name.
        label: The build's label, unique within operation and target.
        arch: The target's word.
    """

    op: str
    label: str
    arch: str


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What became of a job.

    Args:
        job: Which.
        kernel: Name of the kernel function.
        matrix_wanted: Whether the build says that it needs a matrix instruction.
        tile: Rows of the tile that a matrix instruction would work on (`BLOCK_M`), where the build has one.
        num_warps: Of a program.
        resources: What the code says; None where it did not compile.
        error: Why not, one line; empty otherwise.
        seconds: Of the compilation, when it was made.
    """

    job: Job
    kernel: str
    matrix_wanted: bool
    num_warps: int
    resources: Resources | None
    tile: int = 0
    error: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Compiled:
        """The inverse of `to_dict`."""
        found = values["resources"]
        resources = None if found is None else Resources(**{**found, "matrix": tuple(found["matrix"])})
        return Compiled(**{**values, "job": Job(**values["job"]), "resources": resources})


def refusal() -> str:
    """Why this process cannot compile, and what to do; empty where it can."""
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "TRITON_INTERPRET is set, so that kernels would be interpreted; unset it to compile them"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed; pip install triton"
    return ""


def jobs(archs: list[str] | None = None) -> Iterator[Job]:
    """Every build of every registered kernel, by operation and target.

    Raises:
        CoreError: two builds of an operation have one label on a target, so that a table could not tell them apart.
    """
    ops.load()
    for op, kernel in registry.KERNELS.items():
        for arch in archs or TARGETS:
            labels: set[str] = set()
            for build in kernel.builds(TARGETS[arch]):
                if build.label in labels:
                    raise CoreError(f"{op} has two builds {build.label!r} on {arch}; give each a label of its own")
                labels.add(build.label)
                yield Job(op, build.label, arch)


@cache
def _builds(op: str, arch: str) -> dict[str, Build]:
    ops.load()
    return {build.label: build for build in registry.KERNELS[op].builds(TARGETS[arch])}


def compile_job(job: Job, answers: Path | None = None, *, known_only: bool = False) -> Compiled:
    """Compiles and reads; never raises for a kernel's fault.

    Args:
        job: Which build.
        answers: Folder of earlier answers; None asks none and keeps none.
        known_only: Compile nothing; without an earlier answer the error is `NOT_COMPILED`.
    """
    build, target = _builds(job.op, job.arch)[job.label], TARGETS[job.arch]
    place = None if answers is None else answers / f"{_key(build, target)}.json"
    if place is not None and place.exists():
        known = json.loads(place.read_text(encoding="utf-8"))
        return Compiled.from_dict({**known, "job": asdict(job)})
    if known_only:
        return _without_code(job, NOT_COMPILED)
    begin, resources, error = time.perf_counter(), None, ""
    try:
        resources = _compile(build, target)
    except Exception as failure:
        error = _one_line(failure)
    found = Compiled(
        job=job,
        kernel=_name(build),
        matrix_wanted=build.matrix,
        num_warps=build.num_warps,
        resources=resources,
        tile=int(build.constexprs.get("BLOCK_M", 0)),
        error=error,
        seconds=round(time.perf_counter() - begin, 2),
    )
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(found.to_dict()), encoding="utf-8")
        draft.replace(place)
    return found


def crashed(job: Job) -> Compiled:
    """The result of a job that took the compiler's process with it."""
    return _without_code(job, "the compiler's process died")


def _without_code(job: Job, error: str) -> Compiled:
    return Compiled(job=job, kernel="", matrix_wanted=False, num_warps=0, resources=None, error=error)


def _compile(build: Build, target: Target) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    arch: int | str = int(target.arch.removeprefix("sm_")) if target.family == "cuda" else target.arch
    names = list(build.signature) + [name for name in build.constexprs if name not in build.signature]
    order = [name for name in build.kernel.arg_names if name in names]
    signature = {name: build.signature.get(name, "constexpr") for name in order}
    aligned = {(order.index(name),): [["tt.divisibility", 16]] for name in build.divisible if name in order}
    source = ASTSource(build.kernel, signature=signature, constexprs=dict(build.constexprs), attrs=aligned)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    with _private_cache():
        made = compile_source(source, target=GPUTarget(target.family, arch, target.warp_size), options=options)
    shared = int(made.metadata.shared)
    if target.family == "hip":
        return read_amdgcn(made.asm["amdgcn"], shared_bytes=shared)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    # Warp specialisation may add warps to those that were asked for.
    warps = int(made.metadata.num_warps)
    return read_cubin(made.asm["cubin"], target, shared_bytes=shared, num_warps=warps, tools=tools)


@contextmanager
def _private_cache() -> Iterator[None]:
    """Triton's own files are thrown away: our answers are kept instead, and are a thousand times smaller."""
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def _name(build: Build) -> str:
    return str(getattr(build.kernel, "__name__", build.kernel))


def _key(build: Build, target: Target) -> str:
    """Changes whenever the answer could: sources of the kernel and what it calls, arguments, options, tools."""
    import triton

    parts = (
        _READER,
        triton.__version__,
        build.kernel.cache_key,
        sorted(build.signature.items()),
        sorted((name, str(value)) for name, value in build.constexprs.items()),
        sorted(build.divisible),
        (build.num_warps, build.num_stages, build.matrix),
        target,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _one_line(failure: Exception) -> str:
    """The end of the message, which is where compilers say what is wrong."""
    causes = [failure]
    while causes[-1].__cause__ is not None and isinstance(causes[-1].__cause__, Exception):
        causes.append(causes[-1].__cause__)
    text = " ".join(str(causes[-1]).split()) or type(causes[-1]).__name__
    return text if len(text) <= 300 else f"...{text[-297:]}"
