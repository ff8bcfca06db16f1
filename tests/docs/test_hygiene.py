"""Nothing of the machine that a file was written on is left in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from markdown_blocks import REPO_ROOT

MACHINE_PATH = re.compile(r"(?<![\w.:$}/-])/(?:home|root|work|tmp|opt|mnt|Users|data)/[\w.]")
REGISTRY = re.compile(r"pypi[.]org|pythonhosted[.]org|huggingface[.]co(?!/docs)")
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jsonl", ".cpp", ".hpp", ".h", ".cmake", ""}


def tracked() -> list[Path]:
    """Files that git knows, or every file where this is no clone."""
    done = subprocess.run(["git", "ls-files"], cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        found = [REPO_ROOT / name for name in done.stdout.splitlines()]
    else:
        found = [path for path in REPO_ROOT.rglob("*") if not any(part.startswith(".") for part in path.parts)]
    return [path for path in found if path.is_file() and path.suffix in TEXT]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    found: list[str] = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(REPO_ROOT)}:{number}: {line.strip()[:120]}")
    return found


@pytest.mark.parametrize("place", ["home/me/model", "tmp/x", "root/.cache"])
def test_a_machine_path_is_seen(place: str) -> None:
    assert MACHINE_PATH.search(f"open('/{place}')")
    assert not MACHINE_PATH.search(f"models/{place}")
    assert not MACHINE_PATH.search(f"https://example.org/{place}")


def test_no_file_names_a_path_of_a_machine() -> None:
    assert lines_with(MACHINE_PATH) == []


def test_no_file_names_a_registry_host() -> None:
    assert lines_with(REGISTRY) == []
