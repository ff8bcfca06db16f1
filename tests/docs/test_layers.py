"""The layers of `core` hold, and a planted violation of each kind is reported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = "from importlinter.cli import lint_imports_command; lint_imports_command()"

PLANTED = {
    "core is layered": ("core/kv/block_pool.py", "from core.sched import scheduler"),
    "scheduler, cache and text know no torch": ("core/sched/queue.py", "import torch"),
    "core imports no backend and no kernel library": ("core/exec/sampler.py", "import core_sim.kernels"),
    "only plugins and hookspecs import pluggy": ("core/engine/engine.py", "import pluggy"),
    "a backend imports core.spec and core.backend alone": ("core_sim/kernels.py", "import core.exec.sampler"),
}
"""By contract: a file, and an import that it must not have."""


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over the copy, with the project's own contracts."""
    return subprocess.run(
        [sys.executable, "-c", CHECK, "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def status(report: str, contract: str) -> str:
    """KEPT or BROKEN."""
    [found] = re.findall(rf"^{re.escape(contract)} (KEPT|BROKEN)", report, re.MULTILINE)
    return str(found)


def test_the_tree_keeps_every_contract(tree_copy: Path) -> None:
    done = check(tree_copy)
    assert done.returncode == 0, done.stdout + done.stderr
    for contract in PLANTED:
        assert status(done.stdout, contract) == "KEPT"


def test_planted_violations_are_reported(tree_copy: Path) -> None:
    """One bad import for each contract, all at once: each is broken, and named with file and import."""
    for file, line in PLANTED.values():
        path = tree_copy / file
        path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = check(tree_copy)
    assert done.returncode == 1
    for contract, (file, _) in PLANTED.items():
        assert status(done.stdout, contract) == "BROKEN", contract
        assert file.removesuffix(".py").replace("/", ".") in done.stdout


def test_a_module_without_a_layer_is_reported(tree_copy: Path) -> None:
    (tree_copy / "core" / "newcomer.py").write_text('"""Nobody gave it a layer."""\n', encoding="utf-8")
    done = check(tree_copy)
    assert done.returncode == 1
    assert "newcomer" in done.stdout + done.stderr


@pytest.mark.parametrize("contract", PLANTED)
def test_every_contract_of_pyproject_has_a_planted_violation(contract: str, repo_root: Path) -> None:
    text = (repo_root / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{contract}"' in text
    assert text.count("[[tool.importlinter.contracts]]") == len(PLANTED)
