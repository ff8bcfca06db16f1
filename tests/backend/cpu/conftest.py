"""The kernel tests need the built extension of backends/cpu; without it they are left out, and the header says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

INSTALLED = importlib.util.find_spec("core_cpu") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))


def pytest_report_header() -> list[str]:
    """Names the instruction-set level under test."""
    if not INSTALLED:
        return ["cpu backend: tests left out, core-backend-cpu is not installed (pip install backends/cpu)"]
    from core_cpu import _kernels

    return [f"cpu backend: level {_kernels.isa()} of {', '.join(_kernels.isa_levels())}"]
