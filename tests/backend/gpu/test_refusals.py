"""What cannot work is one clear line and exit code 2, from `core serve`, `core doctor` and `core backends`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from core_process import run_core
from tiny import make_tiny

from core import plugins
from core.backend import BackendUnavailableError, OpenConfig
from core.backend.ops import RmsNormOp
from core.cli import main
from core.cli.devices import show_backends
from core.spec import BackendInfo, DeviceInfo, DType
from core_cuda.backend import CudaBackend
from core_rocm.backend import RocmBackend
from core_triton import backend as shared
from core_triton.probing import Found

H100 = DeviceInfo(index=0, arch="sm_90", memory_bytes=80 * 2**30, sdk="driver 580", name="NVIDIA H100")
INFO = BackendInfo(name="cuda", vendor="NVIDIA", api=(1, 0, 0), load="core_cuda.backend:CudaBackend")
NO_DEVICE = not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd"))
without_device = pytest.mark.skipif(not NO_DEVICE, reason="a device is here")

WITHOUT = {"CORE_CUDA_SIMULATE": "", "CORE_ROCM_SIMULATE": "", "TRITON_INTERPRET": ""}
REASONS = {"cuda": "no NVIDIA driver is loaded", "rocm": "the kernel driver amdgpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WITHOUT:
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The error of a command that must end with exit code 2, without a traceback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["core", *args])
        with pytest.raises(SystemExit) as left:
            main()
    assert left.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@without_device
@pytest.mark.parametrize("device", ["cuda", "rocm"])
def test_no_device_is_one_line(model: str, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "doctor", "--model", model, "--device", device)
    assert f"backend '{device}'" in line and "finds no device" in line and REASONS[device] in line


@without_device
def test_serve_ends_at_once_without_a_device_and_leaves_nothing(model: str, tmp_path: Path) -> None:
    done = run_core("serve", model, "--port", "0", "--device", "cuda", env=WITHOUT, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and "finds no device" in line and REASONS["cuda"] in line
    assert list(tmp_path.iterdir()) == []


@without_device
def test_no_device_is_a_row_with_its_reason_and_auto_takes_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "PROBE_TIMEOUT_S", 240.0)
    show_backends(as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    for name, reason in REASONS.items():
        assert rows[name]["devices"] == [] and rows[name]["error"] is None
        assert rows[name]["passed_over"].startswith(reason)
    if "cpu" in rows:
        assert plugins.choose_device("auto")[0].name == "cpu"


@pytest.mark.parametrize(("device", "variable"), [("cuda", "CORE_CUDA_SIMULATE"), ("rocm", "CORE_ROCM_SIMULATE")])
def test_a_simulated_chip_that_is_none_is_told(
    model: str, device: str, variable: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "sm_1")
    line = refused(capsys, "doctor", "--model", model, "--device", device)
    assert f"{variable} names sm_1, which is no chip; give one of" in line


def test_a_simulated_device_is_never_taken_by_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_CUDA_SIMULATE", "sm_90")
    assert plugins.choose_device("auto")[0].name != "cuda"
    listed = {item.name: item for item in plugins.list_backends()}
    assert listed["cuda"].info is not None and listed["cuda"].info.env["TRITON_INTERPRET"] == "1"


def test_an_index_beyond_the_last_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORE_CUDA_SIMULATE", "sm_90,sm_80")
    with pytest.raises(
        BackendUnavailableError, match=r"only 2 device\(s\), number 2 was asked for; the last index is 1"
    ):
        plugins.find_device(CudaBackend(), INFO, 2)


def test_a_block_size_that_the_chip_cannot_take_ends_serve(model: str) -> None:
    env = {**WITHOUT, "CORE_CUDA_SIMULATE": "sm_90"}
    done = run_core("serve", model, "--port", "0", "--device", "cuda", "--block-size", "48", env=env)
    assert done.returncode == 2
    assert "error: --block-size 48 does not fit the device; it takes 16, 32, 64, 128" in done.stderr


@pytest.mark.parametrize(
    "reason",
    [
        "driver 550.54.15 runs CUDA up to 12.4 and torch 2.13.0 is built for CUDA 13.0; install a newer driver",
        "torch 2.13.0+cpu is built without CUDA; install a build of torch for CUDA",
        "Tesla T4 is sm_75 and the kernels are for sm_80, sm_86; choose another --device",
    ],
)
def test_what_the_driver_says_reaches_the_user(
    monkeypatch: pytest.MonkeyPatch, model: str, capsys: pytest.CaptureFixture[str], reason: str
) -> None:
    monkeypatch.setattr(CudaBackend, "look", lambda self: Found(passed_over=(reason,)))
    assert plugins.probe_devices(CudaBackend()) == ([], reason)
    assert refused(capsys, "doctor", "--model", model, "--device", "cuda").endswith(f"finds no device; {reason}")


def _found(self: object) -> Found:
    return Found(devices=(H100,), ordinals=(0,))


def _no_cuda() -> None:
    raise RuntimeError("The NVIDIA driver on your system is too old\nfound version 12040")


@pytest.mark.parametrize(
    ("init", "interpret", "words"),
    [
        (_no_cuda, "", r"torch cannot take GPU 0 \(The NVIDIA driver on your system is too old\)"),
        (lambda: None, "1", "TRITON_INTERPRET=1 is set, with which no kernel reaches a GPU; unset it"),
    ],
)
def test_a_device_that_cannot_be_taken_is_one_line(
    monkeypatch: pytest.MonkeyPatch, init: Callable[[], None], interpret: str, words: str
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(CudaBackend, "look", _found)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(shared.ops, "load", lambda: None)
    with pytest.raises(BackendUnavailableError, match=words):
        CudaBackend().open(0, OpenConfig())


def test_a_device_that_went_away_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RocmBackend, "look", lambda self: Found(passed_over=("gone",)))
    with pytest.raises(BackendUnavailableError, match=r"0 GPU\(s\) can be opened, not number 0: gone"):
        RocmBackend().open(0, OpenConfig())


def test_an_unknown_chip_is_refused_by_every_operation() -> None:
    old = DeviceInfo(index=0, arch="sm_75", memory_bytes=0, sdk="")
    verdict = CudaBackend().supports(RmsNormOp(dtype=DType.BFLOAT16, dim=64, eps=1e-6), old)
    assert verdict.kind == "NO" and "sm_75 is none of the chips" in verdict.reason
