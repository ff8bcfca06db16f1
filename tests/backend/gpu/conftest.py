"""These tests need the packages of both GPU backends; where one is missing they are left out, with the reason."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

MISSING = [
    name
    for name in ("triton", "ml_dtypes", "core_triton", "core_cuda", "core_rocm")
    if not importlib.util.find_spec(name)
]
collect_ignore_glob = ["test_*.py"] if MISSING else []
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))


def pytest_report_header() -> list[str]:
    """Says what is missing."""
    return [f"gpu backends: tests left out, not installed: {', '.join(MISSING)}"] if MISSING else []
