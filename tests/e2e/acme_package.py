"""The package that `core new-backend acme` writes, as tests change and install it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from core_process import run_core

__all__ = ["NAME", "change", "install", "scaffold"]

NAME = "acme"


def scaffold(folder: Path, *flags: str) -> Path:
    """Runs `core new-backend acme` in an empty folder and gives the package's folder."""
    done = run_core("new-backend", NAME, *flags, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / f"core-backend-{NAME}"


def change(package: Path, copy: Path, files: Mapping[str, str]) -> Path:
    """A copy of the package with other text in some files of its module."""
    shutil.copytree(package, copy)
    for name, text in files.items():
        (copy / "src" / f"core_{NAME}" / name).write_text(text, encoding="utf-8")
    return copy


def install(package: Path, site: Path) -> dict[str, str]:
    """Installs the package's wheel into a folder of its own and gives the environment in which it is found."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site))
    source = shutil.copytree(package, site.with_name(f"{site.name}-source"))  # building leaves files behind
    command = [sys.executable, "-m", "pip", "install", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {"PYTHONPATH": str(site)}
