"""From a build to Ascend's IR: Triton IR, linalg (triton-adapter-opt), HIVM (bishengir-compile)."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from core_triton import ops, registry
from core_triton.registry import Build
from core_triton.target import Target

__all__ = ["CHIPS", "Lowered", "Lowering", "builds", "died", "lower", "lowerings", "missing", "to_linalg", "tool"]

CHIPS: Mapping[str, str] = {"Ascend910B1": "Ascend910B1", "Ascend910C": "Ascend910_9382"}
"""What tuning tables call a chip, and bishengir's word for it; the 910C is also called A3."""

_UNIFIED_BUFFER = 192 * 1024
_MOST_CPU_SECONDS = 60
_HIVMC = """#!/bin/sh
# Stands in for CANN's hivmc, which makes NPU code of HIVM: it records that it was reached, and nothing else.
[ "$1" = "--version" ] && { echo "hivmc 1.2.0"; exit 0; }
while [ $# -gt 0 ]; do [ "$1" = "-o" ] && out=$2; shift; done
: > "${out:-a.out}"
"""


@dataclass(frozen=True, order=True)
class Lowering:
    """One build of one operation for one chip, by names alone.

    Args:
        op: The operation's name.
        label: The build's label.
        chip: A key of `CHIPS`.
    """

    op: str
    label: str
    chip: str


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """How far a build came.

    Args:
        job: Which.
        stage: "hivm" where everything before CANN's own tool took it; else where it ended: "triton", "linalg",
            "bishengir".
        reason: Why it went no further; empty at "hivm".
    """

    job: Lowering
    stage: str
    reason: str = ""


def missing() -> str:
    """What this environment lacks, and what to do; empty where nothing is lacking."""
    try:
        import triton.backends.ascend  # noqa: F401
    except ImportError:
        return "this is no environment with triton-ascend: nox -s compiled_ascend makes one"
    return "" if tool("bishengir-compile").exists() else "ascendnpu-ir is not installed: nox -s compiled_ascend"


def tool(name: str) -> Path:
    """A program of the package ascendnpu-ir."""
    found = sorted(Path(sys.prefix).glob(f"lib/python*/site-packages/ascendnpuir/bin/{name}"))
    return found[0] if found else Path(name)


def lowerings() -> list[Lowering]:
    """Every build of every kernel for every chip."""
    return [Lowering(op, build.label, chip) for chip in CHIPS for op, build in builds(chip)]


def builds(chip: str) -> list[tuple[str, Build]]:
    """Every build of every kernel with what is tuned for that chip (or for any target), as (operation, build)."""
    ops.load()
    # No family of Triton's own: tuning and cases fall back on what holds for any target.
    family = cast("Any", "npu")
    target = Target(arch=chip, family=family, warp_size=1, shared_bytes=_UNIFIED_BUFFER)
    return [(op, build) for op, kernel in registry.KERNELS.items() for build in kernel.builds(target)]


def lower(job: Lowering, cache_folder: Path | None = None) -> Lowered:
    """Compiles one build for one chip, as far as it goes; never raises for a kernel's fault.

    Args:
        job: Which.
        cache_folder: Earlier answers of bishengir; None asks none and keeps none.
    """
    build = next(build for op, build in builds(job.chip) if (op, build.label) == (job.op, job.label))
    try:
        text = to_linalg(build.kernel, build.signature, build.constexprs)
    except subprocess.CalledProcessError as error:
        return Lowered(job=job, stage="linalg", reason=_short(str(error.stderr)))
    except Exception as error:
        return Lowered(job=job, stage="triton", reason=_short(str(error)))
    place = None if cache_folder is None else cache_folder / f"{_key(text, job.chip)}.txt"
    if place is not None and place.exists():
        failure = place.read_text(encoding="utf-8")
    else:
        failure = compile_hivm(text, CHIPS[job.chip])
        if place is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(failure, encoding="utf-8")
    return Lowered(job=job, stage="bishengir" if failure else "hivm", reason=_short(failure))


def died(job: Lowering) -> Lowered:
    """The result of a job that took the compiler's process with it."""
    return Lowered(job=job, stage="linalg", reason="the compiler's process died")


def _key(linalg: str, chip: str) -> str:
    tools = [metadata.version(name) for name in ("triton-ascend", "ascendnpu-ir")]
    return hashlib.sha256(repr((linalg, chip, tools, _MOST_CPU_SECONDS)).encode()).hexdigest()[:32]


def to_linalg(kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any]) -> str:
    """The kernel as linalg IR.

    Raises:
        Exception: of Triton's front end, for what its version 3.2 or Ascend does not know.
        CalledProcessError: the adapter refuses the IR; its stderr says why.
    """
    from triton._C.libtriton import ir
    from triton.backends.ascend import compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget("npu", "Ascend910B1", 0)
    backend = compiler.AscendBackend(target)
    options = backend.parse_options({})
    order = [name for name in kernel.arg_names if name in signature]
    source = ASTSource(fn=kernel, signature={name: signature[name] for name in order}, constants=dict(constexprs))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    described = {"hash": "none", "target": target, **dataclasses.asdict(options)}
    module_map = backend.get_module_map() if hasattr(backend, "get_module_map") else {}
    module = source.make_ir(options, backend.get_codegen_implementation(), module_map, context)
    module = compiler.make_ttir(module, described, options)
    # A field that the adapter writes for CANN's own bishengir; the open one does not know it.
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", compiler.ttir_to_linalg(module, described, options, named_ops=True))


def compile_hivm(linalg: str, chip: str) -> str:
    """Runs bishengir over linalg IR; why it fails, or empty where it does not.

    Args:
        linalg: As `to_linalg` returns it.
        chip: bishengir's word.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "kernel.mlir"
        place.write_text(linalg, encoding="utf-8")
        command = [
            str(tool("bishengir-compile")),
            str(place),
            f"--target={chip}",
            "--enable-auto-multi-buffer=true",
            "--enable-hfusion-compile=true",
            "--enable-hivm-compile=true",
            "--enable-triton-kernel-compile=true",
            "-o",
            f"{folder}/kernel.o",
        ]
        path = f"{_stand_in()}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path}
        # Some builds never end; processor time, so that a busy machine gives the same answer.
        limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (_MOST_CPU_SECONDS, _MOST_CPU_SECONDS))
        done = subprocess.run(command, capture_output=True, text=True, env=env, preexec_fn=limit)
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return f"error: not done after {_MOST_CPU_SECONDS} s of processor time"
    if done.returncode == 0:
        return ""
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
    told = [line for line in lines if "Failed to run BiSheng" not in line]
    return "; ".join(told[:2] or lines[:1]) or f"bishengir-compile ended with {done.returncode}"


@cache
def _stand_in() -> Path:
    """A folder with the stand-in for hivmc."""
    folder = Path(tempfile.mkdtemp(prefix="hivmc-"))
    (folder / "hivmc").write_text(_HIVMC, encoding="utf-8")
    (folder / "hivmc").chmod(0o755)
    return folder


def _short(reason: str) -> str:
    """One line without places of files, which differ from run to run."""
    lines: Sequence[str] = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
    text = re.sub(
        r"""loc\("[^"]*":\d+:\d+\)\S*|[\w./<>-]*\.(?:mlir|py):\d+(?::\d+)?:?|<unknown>:0:?""",
        "",
        errors[0] if errors else "",
    )
    return text.replace("|", "/").strip(" :;")[:160]
