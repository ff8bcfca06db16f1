"""Every chore of the project. `nox -s serve` ends with a served model, `nox -s tests` with the tests' verdict."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import nox

nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
RUNTIME = (".", "backends/cpu")
ALL = (
    ".",
    "backends/cpu",
    "backends/sim",
    "backends/triton",
    "backends/cuda",
    "backends/rocm",
    "backends/ascend",
    "conformance",
)
BUILD_TOOLS = ("setuptools", "scikit-build-core", "pybind11", "cmake", "ninja")
TEST_TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "psutil",
    "openai",
    "sentencepiece",
    "accelerate",
    "check-jsonschema",
    "ml_dtypes",
)
LINT_TOOLS = ("ruff", "mypy", "import-linter", "types-tqdm", "types-psutil", "types-PyYAML", "types-jsonschema")
ENVIRONMENT = ROOT / ".nox" / "dev"
MODEL = "smollm2-135m-instruct"
SIMULATED_ENGINES = ("L3/greedy*", "L3/preemption/*-copy", "L3/chunks/copy-*", "L3/drafts/random-copy-*")
"""What of L3 runs on simulated GPUs; the schedules do not depend on the chip."""
ASCEND_COMPILER = (
    "torch==2.13.0", "numpy==2.2.6", "pybind11", "llvmlite", "triton-ascend==3.2.0", "ascendnpu-ir==1.2.0",
)  # fmt: skip
"""triton-ascend lays its files over those of Triton."""
TILELANG = ("torch==2.13.0", "numpy", "triton==3.8.0", "tilelang==0.1.15")
CLIENTS = {
    "openai-2": "openai==2.54.0",
    "openai-3": "openai==3.57.0",
    "litellm": "litellm==1.110.2",
    "langchain-openai": "langchain-openai==1.7.4",
}
"""Published clients that `core serve` is tried with, each in an environment of its own."""


def chore(function: Callable[[nox.Session], None]) -> object:
    """A session that works in the one environment which all of them share: torch is large and installed once."""
    return nox.session(venv_backend="none")(function)


def _run(session: nox.Session, program: str, *arguments: str) -> None:
    """Runs a program of the shared environment."""
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    session.run(str(ENVIRONMENT / "bin" / program), *arguments, env={"PATH": path}, external=True)


def _install(session: nox.Session, packages: tuple[str, ...], *tools: str) -> None:
    """Installs the project's packages, editable, with the pinned versions of everything else."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT), external=True)
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", "constraints.txt")
    _run(session, "python", *pip, "torch", *BUILD_TOOLS, *tools)
    if packages:
        editable = [part for package in packages for part in ("-e", package)]
        _run(session, "python", *pip, "--no-build-isolation", *editable)


@chore
def serve(session: nox.Session) -> None:
    """Serves SmolLM2-135M-Instruct on port 8000 with the CPU backend; further arguments go to `core serve`."""
    _install(session, RUNTIME)
    _run(session, "core", "pull", MODEL)
    _run(session, "core", "serve", MODEL, "--host", "127.0.0.1", "--port", "8000", *session.posargs)


@chore
def tests(session: nox.Session) -> None:
    """All tests that end within minutes: null, unit, backend, e2e, docs, and L0 to L3 of the conformance suite."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    _run(session, "pytest", *(session.posargs or ["tests"]))


@chore
def clients(session: nox.Session) -> None:
    """Published clients, each in an environment of its own, against one running server for each small model."""
    _install(session, ALL, *TEST_TOOLS)
    folder = ENVIRONMENT.with_name("clients")
    for name, package in CLIENTS.items():
        session.run(sys.executable, "-m", "venv", str(folder / name), external=True)
        session.run(str(folder / name / "bin" / "pip"), "install", "-q", package, external=True)
    session.env["CORE_CLIENT_ENVIRONMENTS"] = str(folder)
    _run(session, "pytest", "tests/e2e/test_clients.py", *session.posargs)


@chore
def null(session: nox.Session) -> None:
    """Scheduler and KV manager, without torch, in seconds."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    _run(session, "pytest", "tests/null", *session.posargs)


@chore
def conformance(session: nox.Session) -> None:
    """The conformance suite, L0 to L3, for cpu and sim, and for the reference: four methods and the core's defaults."""
    _install(session, ALL, *TEST_TOOLS)
    for backend in session.posargs or ["cpu", "sim", "reference"]:
        _run(session, "core", "conformance", "run", "--backend", backend, "--level", "L3")


@chore
def simulated(session: nox.Session) -> None:
    """L0 to L2 and a choice of L3 on simulated GPUs: most of an hour; `-- sm_90` takes one chip."""
    _install(session, ALL, *TEST_TOOLS)
    for arch in session.posargs or ["sm_90", "sm_80", "gfx942", "gfx950"]:
        backend, variable = ("cuda", "CORE_CUDA_SIMULATE") if arch.startswith("sm_") else ("rocm", "CORE_ROCM_SIMULATE")
        session.env[variable] = arch
        _run(session, "core", "conformance", "run", "--backend", backend, "--level", "L2")
        for choice in SIMULATED_ENGINES:
            _run(session, "core", "conformance", "run", "--backend", backend, "--level", "L3", "-k", choice)


@chore
def served(session: nox.Session) -> None:
    """L4 of the conformance suite for cpu and sim: a served engine, its accuracy through lm-eval included."""
    _install(session, (*ALL[:-1], f"{ALL[-1]}[accuracy]"), *TEST_TOOLS)
    for backend in session.posargs or ["cpu", "sim"]:
        _run(session, "core", "conformance", "run", "--backend", backend, "--level", "L4", "-k", "L4/", "-v")


@chore
def downstream(session: nox.Session) -> None:
    """A vendor's road to a certificate, from wheels alone, and a deliberate bug that is named."""
    _install(session, ALL, *TEST_TOOLS)
    session.env["CORE_DOWNSTREAM"] = "full"
    _run(session, "pytest", "tests/e2e/test_downstream.py", "tests/e2e/test_far_device.py", "-s", *session.posargs)


@chore
def accuracy(session: nox.Session) -> None:
    """The accuracy gate: perplexity of each scheme beside that of its weights in float32; fails over a limit."""
    _install(session, ALL, *TEST_TOOLS)
    _run(session, "core", "pull", MODEL)
    _run(session, "python", "benchmarks/accuracy.py", *session.posargs)


@chore
def mutants(session: nox.Session) -> None:
    """Plants one bug at a time, each up to its first finding; `-- --matrix docs/kill-matrix.md` runs all ids."""
    _install(session, (*ALL[:-1], f"{ALL[-1]}[accuracy]"), *TEST_TOOLS)
    _run(session, "python", "-m", "core_conformance.mutants", *(session.posargs or ["--quick"]))


@chore
def flaky(session: nox.Session) -> None:
    """L3 twenty times on cpu and on sim, each time with other chance; fails where an id ends in two ways, or badly."""
    _install(session, ALL, *TEST_TOOLS)
    _run(session, "python", "-m", "core_conformance.flaky", *session.posargs)


@chore
def certificate(session: nox.Session) -> None:
    """A certificate from wheels alone: given, verified, and refused once one installed file was edited."""
    _install(session, ALL, *TEST_TOOLS)
    wheels = ENVIRONMENT.with_name("wheels")
    shutil.rmtree(wheels, ignore_errors=True)
    places = [str(ROOT / package) for package in (".", "backends/sim", "conformance")]
    flags = ("--no-deps", "--no-build-isolation", "-q", "-w", str(wheels))
    _run(session, "python", "-m", "pip", "wheel", *flags, *places)
    session.env["CORE_WHEELS"] = str(wheels)
    _run(session, "pytest", "tests/e2e/test_certificate_from_wheels.py", *session.posargs)


@chore
def lint(session: nox.Session) -> None:
    """Ruff."""
    _install(session, (), *LINT_TOOLS)
    _run(session, "ruff", "check", ".")
    _run(session, "ruff", "format", "--check", ".")


@chore
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    _run(session, "mypy")


@chore
def imports(session: nox.Session) -> None:
    """The layers of `core`, and what a backend may import."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    _run(session, "lint-imports")


@chore
def bench(session: nox.Session) -> None:
    """Our own speed, offline; see benchmarks/README.md for the comparison with others."""
    _install(session, RUNTIME)
    _run(session, "core", "pull", MODEL)
    _run(session, "core", "bench", "offline", MODEL, *session.posargs)


@chore
def bench_peers(session: nox.Session) -> None:
    """Ours beside llama.cpp, vLLM and OpenVINO: installs them, then measures; arguments go to benchmarks/compare.py."""
    _install(session, RUNTIME)
    _run(session, "python", "benchmarks/compare.py", *session.posargs)


@chore
def docs(session: nox.Session) -> None:
    """Every command and every name in the docs."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    _run(session, "pytest", "tests/docs", *session.posargs)


@chore
def isa(session: nox.Session) -> None:
    """The CPU kernels under qemu-user on processors that this machine is not; needs `qemu-x86_64` on the path."""
    _install(session, RUNTIME, *TEST_TOOLS)
    _run(session, "pytest", "tests/backend/cpu/test_kernels_qemu.py", *session.posargs)


@chore
def compiled(session: nox.Session) -> None:
    """COMPILED: every Triton kernel for every target, without a GPU; arguments go to `python -m core_triton.aot`."""
    _install(session, ALL)
    _run(session, "python", "-m", "core_triton.aot", *session.posargs)


@chore
def compiled_ascend(session: nox.Session) -> None:
    """The same kernels lowered for Ascend, and three of them run on the host; needs `mlir-translate` of LLVM 19."""
    python = _own_environment(session, "ascend-compile", *ASCEND_COMPILER)
    _run_alone(session, python, "-m", "core_triton.aot.ascend", *session.posargs)


@chore
def tilelang(session: nox.Session) -> None:
    """COMPILED: the TileLang programs for each CUDA target, to lay beside Triton's kernels; needs `nvcc`."""
    python = _own_environment(session, "tilelang", *TILELANG)
    _run_alone(session, python, "backends/cuda/bench/compile_tilelang.py", *session.posargs)


@chore
def roofline(session: nox.Session) -> None:
    """Bytes, operations and least time of each operation on each chip, from published figures: build/roofline."""
    _install(session, ALL)
    _run(session, "python", "-m", "core_triton.roofline", *(session.posargs or ["--out", "build/roofline"]))


@chore
def device(session: nox.Session) -> None:
    """One GPU in at most eight minutes: L0 to L3, kernels, a model, shares of the measured limits; one record."""
    _install(session, ALL, *TEST_TOOLS)
    _run(session, "python", "benchmarks/device", *session.posargs)


@chore
def ascend(session: nox.Session) -> None:
    """A simulated NPU over the real torch_npu: its tests, L0 to L2 of the suite, and greedy decoding of L3."""
    _install(session, ALL, *TEST_TOOLS)
    _run(session, "pytest", "tests/backend/ascend", *session.posargs)
    for selection in (("--level", "L2"), ("--level", "L3", "-k", "L3/greedy")):
        suite = ("core", "conformance", "run", "--backend", "ascend", *selection)
        _run(session, "python", "tests/backend/ascend/npu_environment.py", *suite)


def _own_environment(session: nox.Session, name: str, *packages: str) -> Path:
    """The interpreter of an environment for packages that cannot share one with the others."""
    python = ENVIRONMENT.with_name(name) / "bin" / "python"
    if not python.exists():
        session.run(sys.executable, "-m", "venv", str(python.parents[1]), external=True)
    session.run(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages, external=True)
    return python


def _run_alone(session: nox.Session, python: Path, *arguments: str) -> None:
    """Runs a program of such an environment over the project's sources."""
    sources = os.pathsep.join((str(ROOT), str(ROOT / "backends" / "triton" / "src")))
    session.run(str(python), *arguments, env={"PYTHONPATH": sources}, external=True)
