"""Every chore of the project. `nox -s serve` ends with a served model, `nox -s tests` with the tests' verdict."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
RUNTIME = (".", "backends/cpu")
ALL = (".", "backends/cpu", "backends/sim", "conformance")
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
)
LINT_TOOLS = ("ruff", "mypy", "import-linter", "types-tqdm", "types-psutil", "types-PyYAML")
SHARED_VENV = ".nox/dev"
MODEL = "smollm2-135m-instruct"


def _install(session: nox.Session, packages: tuple[str, ...], *tools: str) -> None:
    """Installs the project's packages, editable, with the pinned versions of everything else."""
    session.install("-q", "-c", "constraints.txt", "torch", *BUILD_TOOLS, *tools)
    editable = [part for package in packages for part in ("-e", package)]
    session.install("-q", "-c", "constraints.txt", "--no-build-isolation", *editable)


@nox.session(venv_location=SHARED_VENV)
def serve(session: nox.Session) -> None:
    """Serves SmolLM2-135M-Instruct on port 8000 with the CPU backend; further arguments go to `core serve`."""
    _install(session, RUNTIME)
    session.run("core", "pull", MODEL)
    session.run("core", "serve", MODEL, "--host", "127.0.0.1", "--port", "8000", *session.posargs)


@nox.session(venv_location=SHARED_VENV)
def tests(session: nox.Session) -> None:
    """All tests that end within minutes: null, unit, backend, e2e, docs, and the conformance suite's short form."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    session.run("pytest", *(session.posargs or ["tests"]))


@nox.session(venv_location=SHARED_VENV)
def null(session: nox.Session) -> None:
    """Scheduler and KV manager, without torch, in seconds."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    session.run("pytest", "tests/null", *session.posargs)


@nox.session(venv_location=SHARED_VENV)
def conformance(session: nox.Session) -> None:
    """The conformance suite, L0 to L3, for cpu and sim."""
    _install(session, ALL, *TEST_TOOLS)
    for backend in session.posargs or ["cpu", "sim"]:
        session.run("core", "conformance", "run", "--backend", backend, "--level", "L3")


@nox.session(venv_location=SHARED_VENV)
def mutants(session: nox.Session) -> None:
    """Plants one bug at a time over the reference backend; fails where one survives the level that must kill it."""
    _install(session, ALL, *TEST_TOOLS)
    session.run("python", "-m", "core_conformance.mutants", *session.posargs)


@nox.session(venv_location=SHARED_VENV)
def lint(session: nox.Session) -> None:
    """Ruff."""
    session.install("-q", "-c", "constraints.txt", *LINT_TOOLS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(venv_location=SHARED_VENV)
def types(session: nox.Session) -> None:
    """Mypy, strict."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    session.run("mypy")


@nox.session(venv_location=SHARED_VENV)
def imports(session: nox.Session) -> None:
    """The layers of `core`, and what a backend may import."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    session.run("lint-imports")


@nox.session(venv_location=SHARED_VENV)
def bench(session: nox.Session) -> None:
    """Our own speed, offline; see benchmarks/README.md for the comparison with others."""
    _install(session, RUNTIME)
    session.run("core", "pull", MODEL)
    session.run("core", "bench", "offline", MODEL, *session.posargs)


@nox.session(venv_location=SHARED_VENV)
def docs(session: nox.Session) -> None:
    """Every command and every name in the docs."""
    _install(session, ALL, *TEST_TOOLS, *LINT_TOOLS)
    session.run("pytest", "tests/docs", *session.posargs)


@nox.session(venv_location=SHARED_VENV)
def isa(session: nox.Session) -> None:
    """The CPU kernels under qemu-user on processors that this machine is not; needs `qemu-x86_64` on the path."""
    _install(session, RUNTIME, *TEST_TOOLS)
    session.run("python", "backends/cpu/tools/qemu_check.py", *session.posargs)


@nox.session
def minimum(session: nox.Session) -> None:
    """The null and unit tests with the oldest versions that pyproject.toml allows (torch stays as pinned)."""
    session.install("-q", "-c", "constraints.txt", "torch", *BUILD_TOOLS)
    lowest = [
        line for line in nox.project.load_toml("pyproject.toml")["project"]["dependencies"] if "torch" not in line
    ]
    session.install("-q", *[line.replace(">=", "==") for line in lowest], "pytest", "pytest-asyncio", "pytest-timeout")
    session.install("-q", "hypothesis", "psutil", "--no-build-isolation", "-e", ".")
    os.environ.setdefault("HYPOTHESIS_PROFILE", "dev")
    session.run("pytest", "tests/null", "tests/unit", *session.posargs)
