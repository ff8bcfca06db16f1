"""`core new-backend`: what it writes, and what it refuses."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from core.cli.new_backend import RESERVED, BackendNames, create_backend, write_backend
from core.errors import ConfigError

REPO_ROOT = Path(__file__).resolve().parents[3]
FILES = {
    *(".github/workflows/conformance.yml", ".gitignore", "README.md", "pyproject.toml", "tests/test_conformance.py"),
    *(f"src/core_big_chip/{name}" for name in ("__init__.py", "backend.py", "kernels.py", "plugin.py", "py.typed")),
}


@pytest.fixture(params=["cpu", "nosuch"])
def package(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A package with a name of two words, for the host or for a device that this torch does not know."""
    write_backend(BackendNames("big-chip"), tmp_path / "p", request.param)
    return tmp_path / "p"


def tool(*args: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-m", *args], cwd=cwd, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_everything_is_written_and_named_after_the_chip(package: Path) -> None:
    written = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*") if path.is_file()}
    assert written.keys() == FILES
    assert [name for name, text in written.items() if "acme" in text.lower()] == []
    project = tomllib.loads(written["pyproject.toml"])["project"]
    assert project["name"] == "core-backend-big-chip"
    assert project["entry-points"] == {"core.backends": {"big-chip": "core_big_chip.plugin"}}
    assert "class BigChipBackend(Backend)" in written["src/core_big_chip/backend.py"]
    assert "backend: big-chip\n" in written[".github/workflows/conformance.yml"]


def test_it_passes_this_projects_rules(package: Path) -> None:
    rules = tomllib.loads((REPO_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]["select"]
    assert tool("ruff", "check", "--no-cache", "--select", ",".join(rules), ".", cwd=package) == ""
    assert tool("ruff", "format", "--no-cache", "--check", ".", cwd=package) == ""


@pytest.mark.parametrize("name", ["a", "x9", "a-very-long-name-for-a-chip-2000"])
def test_names_of_any_length_leave_it_formatted(tmp_path: Path, name: str) -> None:
    write_backend(BackendNames(name), tmp_path / "p", "a_device_of_twenty_chars")
    assert tool("ruff", "format", "--no-cache", "--check", ".", cwd=tmp_path / "p") == ""
    assert tool("ruff", "check", "--no-cache", ".", "--select", "E,F,I", cwd=tmp_path / "p") == ""


def test_a_device_that_torch_does_not_know_is_no_device(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package / "src"))
    try:
        backend = importlib.import_module("core_big_chip.backend").BigChipBackend()
        [info] = importlib.import_module("core_big_chip.plugin").core_backends()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "core_big_chip"]:
            del sys.modules[name]
    known = '"cpu"' in (package / "src" / "core_big_chip" / "backend.py").read_text(encoding="utf-8")
    assert [device.arch for device in backend.probe()] == (["cpu"] if known else [])
    assert (info.name, info.load) == ("big-chip", "core_big_chip.backend:BigChipBackend")
    assert (info.priority < 0) is known, "--device auto takes a new chip, and the host only from its own backend"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My_Chip", "write for example 'my-chip'"),
        ("9lives", "must be lower-case"),
        ("a--b", "write for example 'a-b'"),
        ("", "must be lower-case"),
        ("../x", "must be lower-case"),
        ("x" * 33, "33 characters; give at most 32"),
        *((name, "is reserved") for name in sorted(RESERVED)),
        ("sim", "taken by the installed package core-backend-sim"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create_backend(name, tmp_path, "cpu", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["", "cuda:0", "CPU", 'x"', "x" * 33])
def test_a_device_that_is_no_word_is_refused(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match="--torch-device"):
        create_backend("big-chip", tmp_path, word, force=False)


def test_what_is_there_is_kept_unless_told_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = tmp_path / "core-backend-big-chip" / "src" / "core_big_chip" / "kernels.py"
    create_backend("big-chip", tmp_path, "cpu", force=False)
    before = kernels.read_text(encoding="utf-8")
    kernels.write_text("# mine\n", encoding="utf-8")
    (kernels.parent / "own.py").write_text("# mine\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"exists already.*--force"):
        create_backend("big-chip", tmp_path, "cpu", force=False)
    assert kernels.read_text(encoding="utf-8") == "# mine\n"
    create_backend("big-chip", tmp_path, "cpu", force=True)
    assert kernels.read_text(encoding="utf-8") == before
    assert (kernels.parent / "own.py").exists()
    assert "core conformance next --backend big-chip" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_one_line(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    done = command("new-backend", "big-chip", "--dir", str(tmp_path / "file"))
    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert line.startswith("error: ") and "choose another --dir" in line
