"""Checks of the conformance suite on a simulated chip, in this process, and kernels with a bug planted in them."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from core_conformance.records import Outcome, Record
from core_conformance.run import run_suite
from core_conformance.target import Target, load_target

__all__ = ["failures", "outcomes", "planted", "simulated"]

_VARIABLES = {"cuda": "CORE_CUDA_SIMULATE", "rocm": "CORE_ROCM_SIMULATE"}
_numbers = itertools.count()


@contextmanager
def simulated(device: str, arch: str) -> Iterator[Target]:
    """The backend with that chip for its only device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_VARIABLES[device], arch)
        target = load_target(device)
        try:
            yield target
        finally:
            target.close()


def outcomes(device: str, arch: str, ids: Sequence[str]) -> dict[str, Record]:
    """The records of these checks, which all must have run."""
    levels = sorted({check_id[:2] for check_id in ids})
    with simulated(device, arch) as target:
        report = run_suite(target, levels, select=frozenset(ids).__contains__, expected=ids)
    records = {record.id: record for record in report.records if record.id in frozenset(ids)}
    assert set(records) == set(ids), f"did not run: {sorted(set(ids) - set(records))}"
    assert all(record.mode == "SIMULATED" for record in records.values())
    return records


def failures(records: dict[str, Record]) -> dict[str, str]:
    """Reason by id, of what did not pass."""
    return {name: record.reason for name, record in records.items() if record.outcome is not Outcome.PASS}


@contextmanager
def planted(module: str, kernel: str, right: str, wrong: str) -> Iterator[None]:
    """Within it, function `kernel` of `core_triton.kernels.MODULE` has `wrong` for `right`, wherever it is used."""
    known = importlib.import_module(f"core_triton.kernels.{module}")
    source = Path(str(known.__file__)).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{right!r} is {source.count(right)} times in {module}"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        changed = _load(Path(folder) / f"mutant_{next(_numbers)}.py", source.replace(right, wrong))
        original = getattr(known, kernel)
        for user in [m for name, m in sys.modules.items() if name.startswith("core_triton.")]:
            if getattr(user, kernel, None) is original:
                patch.setattr(user, kernel, getattr(changed, kernel))
        yield


def _load(path: Path, source: str) -> ModuleType:
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
