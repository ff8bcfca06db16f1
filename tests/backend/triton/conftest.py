"""These tests run kernels in Triton's interpreter; the process is switched to it before anything imports Triton."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

MISSING = [name for name in ("triton", "ml_dtypes", "core_triton") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))
if not MISSING:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_report_header() -> list[str]:
    """Says what is missing."""
    return [f"triton kernels: tests left out, not installed: {', '.join(MISSING)}"] if MISSING else []
