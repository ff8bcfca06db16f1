"""Checks that a vendor's package brings for its own backend, run beside the suite's."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence

from core.spec import ConformanceCase
from core_conformance.records import Outcome, Record
from core_conformance.target import Target

__all__ = ["run_vendor_cases"]


def run_vendor_cases(
    target: Target, cases: Sequence[ConformanceCase], *, select: Callable[[str], bool] = lambda check_id: True
) -> list[Record]:
    """One record a case: PASS where its function returns, FAIL where it raises, ERROR where it is no valid case.

    They belong to no level, so that none is complete or incomplete by them; a failure fails the run.
    """
    return [_run(target, case) for case in cases if select(case.id)]


def _run(target: Target, case: ConformanceCase) -> Record:
    start = time.perf_counter()
    outcome, reason = _outcome(target, case)
    return Record(id=case.id, outcome=outcome, reason=reason, seconds=time.perf_counter() - start, mode=target.mode)


def _outcome(target: Target, case: ConformanceCase) -> tuple[Outcome, str]:
    if not case.id.startswith(f"{target.name}/"):
        return Outcome.ERROR, f"the id must begin with {target.name}/"
    module, _, name = case.load.partition(":")
    try:
        check = getattr(importlib.import_module(module), name)
    except Exception as error:
        return Outcome.ERROR, f"{case.load} cannot be imported: {type(error).__name__}: {error}"
    try:
        check(target.backend)
    except Exception as error:
        return Outcome.FAIL, f"{type(error).__name__}: {error}"
    return Outcome.PASS, ""
