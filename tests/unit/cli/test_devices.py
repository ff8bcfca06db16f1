"""Tables of `core backends` and `core doctor`."""

from __future__ import annotations

import json

import pytest

from core.cli import devices
from core.plugins import BackendListing
from core.spec import BackendInfo, DeviceInfo

INFO = BackendInfo(name="toy", vendor="Toys", api=(1, 0, 0), load="toy:Toy", remedy="plug it in")
DEVICE = DeviceInfo(index=0, arch="toy-1", memory_bytes=2**31, sdk="9.9", name="Toy One")
LISTINGS = [
    BackendListing(package="toy 1", info=INFO, devices=(DEVICE,)),
    BackendListing(package="bare 2", info=INFO, devices=()),
    BackendListing(package="broken 3", error="ImportError: no libtoy"),
]


def test_devices_remedies_and_errors_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(devices, "list_backends", lambda probe: LISTINGS)
    devices.show_backends(as_json=False)
    shown = capsys.readouterr().out
    for words in ("Toy One", "toy-1", "2.0 GiB", "ok (9.9)", "no device; plug it in", "ImportError: no libtoy"):
        assert words in shown
    devices.show_backends(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["devices"][0]["arch"] == "toy-1"
    assert listed[2] == {
        "name": "broken 3",
        "package": "broken 3",
        "vendor": None,
        "api": None,
        "priority": None,
        "devices": [],
        "error": "ImportError: no libtoy",
    }


def test_no_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(devices, "list_backends", lambda probe: [])
    devices.show_backends(as_json=False)
    assert "pip install" in capsys.readouterr().out
