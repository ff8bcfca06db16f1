"""What the policing tests share: the documents, and a copy of the tree that may be spoiled."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from markdown_blocks import REPO_ROOT  # noqa: E402

SOURCES = {
    "core": "core",
    "core_cpu": "backends/cpu/src/core_cpu",
    "core_sim": "backends/sim/src/core_sim",
    "core_triton": "backends/triton/src/core_triton",
    "core_cuda": "backends/cuda/src/core_cuda",
    "core_rocm": "backends/rocm/src/core_rocm",
    "core_ascend": "backends/ascend/src/core_ascend",
    "core_conformance": "conformance/src/core_conformance",
}
"""Import packages of the project and where their sources are."""


@pytest.fixture
def tree_copy(tmp_path: Path) -> Path:
    """The project's Python sources side by side in one folder, with pyproject.toml; nothing else."""
    folder = tmp_path / "tree"
    folder.mkdir()
    shutil.copy(REPO_ROOT / "pyproject.toml", folder)
    for package, source in SOURCES.items():
        if (REPO_ROOT / source).is_dir():
            shutil.copytree(REPO_ROOT / source, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder
