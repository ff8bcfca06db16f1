"""Ruff and mypy, as the sessions `lint` and `types` run them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from markdown_blocks import REPO_ROOT


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *args], cwd=REPO_ROOT, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.parametrize("args", [("check", "."), ("format", "--check", ".")])
def test_ruff(args: tuple[str, ...]) -> None:
    done = run("ruff", *args)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.timeout(900)
def test_mypy_strict() -> None:
    done = run("mypy")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
