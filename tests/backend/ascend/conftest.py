"""The way to the environment in which torch_npu lives: torch's own environment must not have it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

INSTALLED = importlib.util.find_spec("core_ascend") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_report_header() -> list[str]:
    """Says why tests are left out."""
    missing = "ascend backend: tests left out, core-backend-ascend is not installed (pip install backends/ascend)"
    return [] if INSTALLED else [missing]


@pytest.fixture(scope="session")
def npu_python() -> Path:
    """An interpreter that sees this environment's packages and torch_npu."""
    from npu_environment import NoEnvironment, npu_python

    try:
        return npu_python()
    except NoEnvironment as error:
        pytest.skip(str(error))
