"""The set-up commands: the README's two, CI's, CONTRIBUTING's, and the sessions and packages behind them."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from markdown_blocks import REPO_ROOT, blocks, commands, documents

WALKED = "writing-a-backend.md"
"""Its commands are about a package that one of them writes; see test_backend_walk.py."""
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
    [everything] = re.findall(r"^ALL = \((.*?)\)", source, re.MULTILINE | re.DOTALL)
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


def words_of_commands(*beginnings: str) -> list[tuple[Path, list[str]]]:
    """(document, words) of every documented command that begins so, but those about the package of the walk."""
    found = [(path, command) for path in documents(REPO_ROOT) if path.name != WALKED for command in commands_of(path)]
    return [(path, command.split()) for path, command in found if command.startswith(beginnings)]


def test_documented_packages_exist() -> None:
    """What is pip-installed is a package of ours, by name or folder, or a build tool of the noxfile."""
    projects = [path for path in REPO_ROOT.glob("**/pyproject.toml") if _is_ours(path)]
    known = {tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"] for path in projects}
    known |= {str(path.parent.relative_to(REPO_ROOT)) for path in projects}
    source = (REPO_ROOT / "noxfile.py").read_text(encoding="utf-8")
    known |= set(re.findall(r'"(.*?)"', re.findall(r"^BUILD_TOOLS = \((.*)\)", source, re.MULTILINE)[0]))
    for path, words in words_of_commands("pip install"):
        for word in words[2:]:
            package = word.strip("'").partition("[")[0]  # 'conformance[accuracy]' is quoted for the shell
            assert word.startswith("-") or package in known, f"{path.name}: {word}"


def test_documented_scripts_and_folders_exist() -> None:
    for path, words in words_of_commands("python ", "pytest "):
        if words[1] == "-m":
            assert importlib.util.find_spec(words[2]) is not None, f"{path.name}: {words[2]}"
        else:
            assert (REPO_ROOT / words[1]).exists(), f"{path.name}: {words[1]}"


def test_the_interface_page_is_what_its_command_gives() -> None:
    args = [sys.executable, "-m", "core_conformance.interface"]
    done = subprocess.run(args, cwd=REPO_ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (REPO_ROOT / "docs" / "interface.md").read_text(encoding="utf-8")
