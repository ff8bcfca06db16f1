"""What every folder of tests shares: the repository's root and the way to the tiny models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests/unit/models", "tests/e2e"):
    if str(REPO_ROOT / folder) not in sys.path:
        sys.path.append(str(REPO_ROOT / folder))
# Before anything imports Triton, whatever is collected first: kernels run interpreted in this process.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds pyproject.toml."""
    return REPO_ROOT
