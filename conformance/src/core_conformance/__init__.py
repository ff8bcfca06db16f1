"""What it means for a backend and a model to work together: levels of checks, run against any installed backend.

Names are imported when they are used: listing ids needs neither torch nor pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core_conformance.records import Outcome, Record
    from core_conformance.report.document import Report
    from core_conformance.run import run_suite
    from core_conformance.supervise import run_supervised
    from core_conformance.target import Target, load_target

__all__ = ["Outcome", "Record", "Report", "Target", "load_target", "run_suite", "run_supervised"]

_HOMES = {
    "Outcome": "records",
    "Record": "records",
    "Report": "report.document",
    "Target": "target",
    "load_target": "target",
    "run_suite": "run",
    "run_supervised": "supervise",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
