"""Tables of `core backends` and `core doctor`."""

from __future__ import annotations

import dataclasses
import json

import pytest
import typer
from typer.testing import CliRunner

from core.cli import devices
from core.cli.app import app
from core.config import EngineConfig
from core.engine.doctor import DoctorReport, OperationRow, WeightRow
from core.plugins import BackendListing
from core.spec import BackendInfo, DeviceInfo

INFO = BackendInfo(name="toy", vendor="Toys", api=(1, 0, 0), load="toy:Toy", remedy="plug it in")
DEVICE = DeviceInfo(index=0, arch="toy-1", memory_bytes=2**31, sdk="9.9", name="Toy One")
LISTINGS = [
    BackendListing(package="toy 1", info=INFO, devices=(DEVICE,)),
    BackendListing(package="bare 2", info=INFO, devices=()),
    BackendListing(package="old 1", info=INFO, devices=(), passed_over="Toy Zero is toy-0: buy a new one"),
    BackendListing(package="broken 3", error="ImportError: no libtoy"),
]


def test_devices_remedies_and_errors_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "list_backends", lambda probe: LISTINGS)
    devices.show_backends(as_json=False)
    shown = capsys.readouterr().out
    told = ("Toy One", "toy-1", "2.0 GiB", "ok (9.9)", "no device; plug it in", "no device; Toy Zero is")
    for words in (*told, "ImportError: no libtoy"):
        assert words in shown
    devices.show_backends(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["devices"][0]["arch"] == "toy-1"
    assert listed[3] == {
        "name": "broken 3",
        "package": "broken 3",
        "vendor": None,
        "api": None,
        "priority": None,
        "devices": [],
        "error": "ImportError: no libtoy",
        "passed_over": "",
    }


REPORT = DoctorReport(
    model="m",
    architecture="ToyForCausalLM",
    backend="toy:0",
    package="toy 1",
    arch="toy-1",
    dtype="bfloat16",
    operations=(
        OperationRow(operation="linear", spec="linear(a=64)", kind="NATIVE", reason="", uses=3),
        OperationRow(operation="norm_add", spec="norm_add(b=64)", kind="NO", reason="its part norm: never", uses=2),
        OperationRow(operation="norm", spec="norm(c=64)", kind="NO", reason="never", uses=2, part_of="norm_add"),
    ),
    weights=(WeightRow(stored="q4_0", kept="none", count=9, reason="no kernel"),),
    table_hash="abc",
    graphs="no graphs (the backend records no steps)",
    usable=False,
)


def test_the_doctor_shows_every_row_and_fails_where_an_operation_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("core.engine.doctor.report", lambda config, arch: REPORT)
    with pytest.raises(typer.Exit) as left:
        devices.show_doctor(EngineConfig(model="m"), as_json=False)
    assert left.value.exit_code == 2
    shown = capsys.readouterr().out
    for words in ("ToyForCausalLM", "a=64", "its part norm: never", "q4_0", "no kernel", "refuses", "abc"):
        assert words in shown


def test_the_doctor_takes_engine_flags_and_writes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def report(config: EngineConfig, arch: str) -> DoctorReport:
        seen.append(config)
        return dataclasses.replace(REPORT, usable=True)

    monkeypatch.setattr("core.engine.doctor.report", report)
    done = CliRunner().invoke(app, ["doctor", "--model", "m", "--device", "toy:1", "--dtype", "float32", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["operations"][0]["kind"] == "NATIVE"
    assert (seen[0].model, seen[0].device, seen[0].dtype) == ("m", "toy:1", "float32")


def test_no_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "list_backends", lambda probe: [])
    devices.show_backends(as_json=False)
    assert "pip install" in capsys.readouterr().out
