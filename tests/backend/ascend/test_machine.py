"""What the probe makes of a machine, on trees of files that look like one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trees import SMI_310P, SMI_910B, plant

from core_ascend import machine
from core_ascend.plugin import ENVIRONMENT, core_backends


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty tree, no simulation, and torch_npu as if it were installed."""
    monkeypatch.setenv(machine.ROOT_ENV, str(tmp_path))
    monkeypatch.delenv(machine.SIMULATE_ENV, raising=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: object() if name == "torch_npu" else real(name, *a)
    )
    return tmp_path


def test_boards_are_listed_as_the_tool_tells_of_them(tmp_path: Path) -> None:
    plant(tmp_path, nodes=2, smi=SMI_910B)
    assert machine.problem() == ""
    first, second = machine.devices()
    assert (first.index, first.arch, first.memory_bytes, first.simulated) == (0, "Ascend910B3", 65536 * 2**20, False)
    assert second.index == 1
    assert first.sdk == "driver 24.1.0.3, CANN 8.3.1"


def test_a_container_sees_as_many_boards_as_it_has_nodes(tmp_path: Path) -> None:
    plant(tmp_path, nodes=1, smi=SMI_910B)
    assert [device.index for device in machine.devices()] == [0]


def test_without_the_tool_pci_ids_tell_the_family(tmp_path: Path) -> None:
    plant(tmp_path, nodes=1, pci=["0xd803"])
    [device] = machine.devices()
    assert device.arch == "Ascend910_9382"


def test_a_tool_that_hangs_or_fails_leaves_the_pci_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, nodes=1, pci=["0xd802"], smi="exit 1")
    monkeypatch.setattr(machine, "_SMI_TIMEOUT_S", 0.5)
    assert [device.arch for device in machine.devices()] == ["Ascend910B3"]
    plant(tmp_path, nodes=1, pci=["0xd802"], smi="sleep 5")
    assert [device.arch for device in machine.devices()] == ["Ascend910B3"]


def test_an_older_board_is_listed_too(tmp_path: Path) -> None:
    plant(tmp_path, nodes=1, smi=SMI_310P)
    assert [device.arch for device in machine.devices()] == ["Ascend310P3"]


@pytest.mark.parametrize(
    ("planted", "word"),
    [
        ({"nodes": 0}, "no /dev/davinci* node"),
        ({"driver": ""}, "no driver version"),
        ({"driver": "23.0.1"}, "the Ascend driver is 23.0.1, at least 24.1"),
        ({"cann": ""}, "no CANN toolkit"),
        ({"pci": ["0xd801"]}, "Ascend910A"),
    ],
)
def test_what_keeps_devices_from_use_is_said_with_what_to_do(
    tmp_path: Path, planted: dict[str, Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    from core_ascend.backend import AscendBackend

    plant(tmp_path, **({"nodes": 1, "pci": ["0xd802"]} | planted))
    assert word in machine.problem()
    assert AscendBackend().probe() == []
    assert word in caplog.text
    [info] = core_backends()
    assert word in info.remedy


def test_torch_npu_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, nodes=1, smi=SMI_910B)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None)
    assert "torch_npu is not installed" in machine.problem()


def test_simulated_chips_are_listed_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.SIMULATE_ENV, "Ascend910B3, Ascend310P3")
    assert [(d.arch, d.simulated) for d in machine.devices()] == [("Ascend910B3", True), ("Ascend310P3", True)]
    monkeypatch.setenv(machine.SIMULATE_ENV, "Ascend950")
    assert machine.devices() == []
    assert "Ascend950" in machine.problem()


def test_auto_takes_the_backend_only_where_the_driver_shows_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert core_backends()[0].priority < 0
    plant(tmp_path, nodes=1, smi=SMI_910B)
    assert core_backends()[0].priority > 0
    monkeypatch.setenv(machine.SIMULATE_ENV, "Ascend910B3")
    assert core_backends()[0].priority < 0


def test_the_process_of_the_device_starts_without_fallback_and_without_autoload() -> None:
    assert ENVIRONMENT == {"TORCH_NPU_FALLBACK_CPU_DISABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_the_plugin_imports_neither_torch_nor_torch_npu() -> None:
    code = (
        "import sys, core_ascend.plugin as p; p.core_backends(); "
        "print([m for m in ('torch', 'torch_npu') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
