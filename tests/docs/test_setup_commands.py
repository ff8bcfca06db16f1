"""The set-up commands: the README's two, CI's, CONTRIBUTING's, and the sessions and packages behind them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from markdown_blocks import REPO_ROOT, blocks, commands, documents

SETUP = "python3 -m venv .venv && .venv/bin/pip install -q nox && .venv/bin/nox -s "


def commands_of(path: Path) -> list[str]:
    return [command for block in blocks(path) for command in commands(block)]


def sessions() -> dict[str, str]:
    """Source of each nox session by name."""
    source = (REPO_ROOT / "noxfile.py").read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(source, node) or ""
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.decorator_list
    }


def test_the_readme_has_exactly_two_setup_commands() -> None:
    found = [command for command in commands_of(REPO_ROOT / "README.md") if "venv" in command or "nox" in command]
    assert found == [SETUP + "serve", SETUP + "tests"]


def test_ci_runs_the_readmes_test_command() -> None:
    script = (REPO_ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert script[-1] == SETUP + "tests"
    assert "set -euo pipefail" in script
    assert (REPO_ROOT / ".ci" / "run").stat().st_mode & 0o100


def test_the_serve_session_pulls_and_serves_on_port_8000() -> None:
    found = sessions()["serve"]
    install, pull, serve = (found.index(word) for word in ("_install(", '"pull"', '"serve"'))
    assert install < pull < serve
    assert '"--port", "8000"' in found
    readme = (REPO_ROOT / "README.md").read_text(encoding="utf-8")
    [model] = re.findall(r'^MODEL = "(.*)"', (REPO_ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert f'"model": "{model}"' in readme
    assert "127.0.0.1:8000" in readme


def test_the_tests_session_runs_all_tests_of_all_packages() -> None:
    found = sessions()["tests"]
    assert '["tests"]' in found
    assert "ALL" in found
    source = (REPO_ROOT / "noxfile.py").read_text(encoding="utf-8")
    [everything] = re.findall(r"^ALL = \((.*)\)", source, re.MULTILINE)
    packages = {str(p.parent.relative_to(REPO_ROOT)) for p in REPO_ROOT.glob("**/pyproject.toml") if _is_ours(p)}
    assert set(re.findall(r'"(.*?)"', everything)) == packages


def _is_ours(path: Path) -> bool:
    return not any(part.startswith(".") or part == "build" for part in path.relative_to(REPO_ROOT).parts)


def test_documented_sessions_exist() -> None:
    named: set[str] = set()
    for path in documents(REPO_ROOT):
        for words in re.findall(r"nox -s ((?:\w+ ?)+)", path.read_text(encoding="utf-8")):
            named |= set(words.split())
    assert {"serve", "tests", "null", "lint", "types"} <= named
    unknown = {name for name in named if name not in sessions() and name not in ("checks", "at")}
    assert not unknown


def test_documented_packages_exist() -> None:
    names = {
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]
        for path in REPO_ROOT.glob("**/pyproject.toml")
        if _is_ours(path)
    }
    for path in documents(REPO_ROOT):
        for command in commands_of(path):
            for package in re.findall(r"pip install (core-\S+)", command):
                assert package in names, f"{path.name}: {package}"
