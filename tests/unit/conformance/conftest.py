"""Reports that no run has to be waited for, and a vendor's package that is installed for one test."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.spec import BackendInfo, DeviceInfo
from core_conformance.checks import MARK
from core_conformance.must_pass_lists import must_pass
from core_conformance.records import Mode, Outcome, Record
from core_conformance.report import facts as facts_module
from core_conformance.report.document import Report
from core_conformance.report.facts import gather_facts
from core_conformance.report.provenance import Package

MODELS = ("llama", "gemma3", "copy")
INFO = BackendInfo(name="acme", vendor="acme", api=(1, 0, 0), load="acme_backend:Acme")
MakeReport = Callable[..., Report]


def pytest_configure(config: pytest.Config) -> None:
    """Announces the suite's mark, so that checks can be imported and called."""
    config.addinivalue_line("markers", f"{MARK}(id, mandatory): a check of the conformance suite")


def _record(check_id: str, mode: Mode) -> Record:
    model = next((name for name in MODELS if name in check_id), "") if check_id > "L2" else ""
    numbers: dict[str, Any] = {"err": 0.25, "bound": 0.5, "ratio": 0.5} if check_id.startswith(("L1/", "L2/")) else {}
    kinds = {"attention": "NATIVE", "rms_norm": "COMPOSITE"} if check_id > "L1" else {}
    return Record(id=check_id, outcome=Outcome.PASS, model=model, kinds=kinds, mode=mode, seconds=0.5, **numbers)


def _clean(package: Package) -> Package:
    return dataclasses.replace(package, source="checkout", revision="0" * 40, dirty=False, edited=())


@pytest.fixture(autouse=True, scope="module")
def packages_as_they_are() -> None:
    """A module's reports tell of the packages as they are now, as `verify` will see them."""
    facts_module._inspect.cache_clear()


@pytest.fixture
def make_report() -> MakeReport:
    """Makes a report of every id of some levels; `change` maps an id to fields of its record, None takes it out."""

    def make(
        *levels: str,
        change: dict[str, dict[str, Any] | None] | None = None,
        mode: Mode = Mode.VALIDATED,
        device: str = "acme-1",
        problems: list[str] | None = None,
        **facts: Any,
    ) -> Report:
        levels = levels or ("L0", "L1", "L2", "L3")
        simulated = mode is Mode.SIMULATED
        info = DeviceInfo(index=0, arch=device, memory_bytes=2**30, sdk="sdk 3", name="Acme One", simulated=simulated)
        made = gather_facts(INFO, info, package="core-inference", levels=levels)
        made = dataclasses.replace(
            made,
            mode=mode,
            core=_clean(made.core),
            suite=_clean(made.suite),
            package=_clean(made.package),
            **{"date": "2030-01-02T03:04:05+00:00", **facts},
        )
        records = {check_id: _record(check_id, mode) for check_id in must_pass(levels)}
        for check_id, fields in (change or {}).items():
            if fields is None:
                del records[check_id]
            else:
                known = records.get(check_id) or _record(check_id, mode)
                records[check_id] = dataclasses.replace(known, **fields)
        return Report(made, [records[name] for name in sorted(records)], problems or [])

    return make


@pytest.fixture
def install_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Installs, for this test and the processes that it starts, a backend package `acme` of the given source."""

    def install(source: str) -> None:
        site = tmp_path / "site"
        info = site / "acme-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text("[core.backends]\nacme = acme_plugin\n", encoding="utf-8")
        (info / "RECORD").write_text("", encoding="utf-8")
        plugin = """
            from core.hookspecs import hookimpl
            from core.spec import BackendInfo


            @hookimpl
            def core_backends():
                return [BackendInfo(name="acme", vendor="acme", api=(1, 0, 0), load="acme_backend:Acme")]
        """
        (site / "acme_plugin.py").write_text(textwrap.dedent(plugin), encoding="utf-8")
        (site / "acme_backend.py").write_text(textwrap.dedent(source), encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(site))

    return install
