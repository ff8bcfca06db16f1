"""Which model is to be shown on which machine: tables, jobs, and the jobs that a change concerns."""

from __future__ import annotations

from core_conformance.matrix.changes import changed_files, repository_root, touched
from core_conformance.matrix.jobs import Job, Wanted, expand, with_wanted
from core_conformance.matrix.render import FORMATS
from core_conformance.matrix.tables import ModelRow, RunnerRow, Tables, read_tables

__all__ = [
    "FORMATS",
    "Job",
    "ModelRow",
    "RunnerRow",
    "Tables",
    "Wanted",
    "changed_files",
    "expand",
    "read_tables",
    "repository_root",
    "touched",
    "with_wanted",
]
