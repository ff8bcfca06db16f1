"""What keeps a model from being served on an NPU is said in one line that ends with what to do, and exit code 2."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from core_process import run_core
from trees import plant

from core import plugins
from core.backend import OpenConfig
from core.config import EngineConfig
from core.engine.doctor import report
from core.errors import BackendUnavailableError
from core_ascend import machine
from core_conformance.engines.models import model_folder


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree that this process takes for the machine."""
    monkeypatch.setenv(machine.ROOT_ENV, str(tmp_path))
    monkeypatch.delenv(machine.SIMULATE_ENV, raising=False)
    return tmp_path


CASES = {
    "no-device": ({"nodes": 0}, "no /dev/davinci* node: install the Ascend driver"),
    "old-driver": ({"driver": "23.0.1"}, "at least 24.1 is needed: upgrade driver and firmware"),
    "no-sdk": ({"cann": ""}, "no CANN toolkit under /usr/local/Ascend: install it"),
    "no-torch-npu": ({}, "torch_npu is not installed: `pip install torch_npu`"),
}


@pytest.mark.parametrize("case", CASES)
def test_serve_and_doctor_refuse_a_machine_with_the_same_words(tree: Path, case: str) -> None:
    planted, words = CASES[case]
    plant(tree, **({"nodes": 1, "pci": ["0xd802"]} | planted))
    for attempt in (
        lambda: plugins.open_device("ascend", OpenConfig()),
        lambda: report(EngineConfig(model=str(model_folder("llama")), device="ascend")),
    ):
        with pytest.raises(BackendUnavailableError) as caught:
            attempt()
        assert words in str(caught.value)
        assert caught.value.exit_code == 2


def test_an_unknown_chip_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(machine.SIMULATE_ENV, "Ascend950")
    with pytest.raises(BackendUnavailableError, match="'Ascend950' is none that this package drives"):
        plugins.open_device("ascend", OpenConfig())


def test_backends_lists_the_reason_and_serve_ends_with_it(tree: Path) -> None:
    plant(tree, nodes=1, driver="23.0.1")
    env = {machine.ROOT_ENV: str(tree)}
    listed = run_core("backends", "--json", env=env)
    [mine] = [item for item in json.loads(listed.stdout) if item["name"] == "ascend"]
    assert mine["error"] is None, mine
    assert mine["devices"] == [] and "the Ascend driver is 23.0.1" in mine["passed_over"]
    served = run_core("serve", str(model_folder("llama")), "--device", "ascend", "--port", "0", env=env)
    assert served.returncode == 2, served.stderr
    assert "the Ascend driver is 23.0.1, at least 24.1 is needed" in served.stderr
    assert "Traceback" not in served.stderr


def test_fp8_that_was_asked_for_is_refused_by_doctor(tmp_path: Path) -> None:
    done = run_core(
        "doctor", "--model", str(model_folder("llama")), "--device", "ascend", "--arch", "Ascend910B3",
        "--quantization", "fp8",
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert "910B has no FP8 unit: use --quantization int8, or none" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_torch_npu_without_its_sdk_is_refused_by_name(tree: Path, npu_python: Path) -> None:
    plant(tree, nodes=1, pci=["0xd802"])
    done = subprocess.run(
        [str(npu_python), "-m", "core.cli", "serve", str(model_folder("llama")), "--device", "ascend", "--port", "0"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "torch_npu cannot be imported" in done.stderr and "set_env.sh" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_block_size_that_the_chip_cannot_take_is_refused(npu_python: Path) -> None:
    from npu_environment import simulated

    command = [str(npu_python), "-m", "core.cli", "serve", str(model_folder("llama")), "--device", "ascend"]
    done = subprocess.run(
        [*command, "--block-size", "16", "--port", "0"],
        env=simulated(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "--block-size 16 does not fit the device; it takes 128" in done.stderr
