"""Every dependency has its reason in CONTRIBUTING.md, and every reason its dependency."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from markdown_blocks import REPO_ROOT

OURS = re.compile(r"core-")


def projects() -> list[Path]:
    found = [REPO_ROOT / "pyproject.toml", *REPO_ROOT.glob("backends/*/pyproject.toml")]
    return [*found, *REPO_ROOT.glob("conformance/pyproject.toml")]


def dependencies(path: Path) -> set[str]:
    """Names of what the package and its extras need to run and to be built, its own siblings left out."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    extras = raw["project"].get("optional-dependencies", {})
    needed = [*raw["project"].get("dependencies", ()), *raw["build-system"]["requires"], *chain(*extras.values())]
    names = {re.split(r"[\s<>=!~;\[]", need, maxsplit=1)[0] for need in needed}
    return {normal(name) for name in names if not OURS.match(name) and name != "setuptools"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def explained() -> set[str]:
    text = (REPO_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Dependencies")[2]
    rows = re.findall(r"^\| ([^|]+) \| [^|]{10,} \|$", text, re.MULTILINE)
    return {normal(name) for row in rows for name in row.strip().split(", ")} - {"package"}


@pytest.mark.parametrize("path", projects(), ids=lambda path: path.parent.name)
def test_every_dependency_is_explained(path: Path) -> None:
    assert dependencies(path) - explained() == set()


def test_nothing_is_explained_that_is_not_needed() -> None:
    needed = set[str]().union(*(dependencies(path) for path in projects()))
    assert explained() - needed == set()


def test_the_pinned_versions_are_of_the_dependencies() -> None:
    """Every direct dependency has a pinned version, so that set-up installs tomorrow what was tested today."""
    lines = (REPO_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal(line.partition("==")[0]) for line in lines if "==" in line}
    needed = set[str]().union(*(dependencies(path) for path in projects()))
    assert needed - pinned == set()
