"""What it means for a backend and a model to work together: levels of checks, run against any installed backend."""

from __future__ import annotations

from core_conformance.records import Outcome, Record
from core_conformance.run import Report, run_suite
from core_conformance.target import Target, load_target

__all__ = ["Outcome", "Record", "Report", "Target", "load_target", "run_suite"]
