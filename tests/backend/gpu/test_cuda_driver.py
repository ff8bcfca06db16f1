"""NVIDIA's driver as `probe` sees it: through a stand-in for its management library, built here, and fake files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core_cuda import driver
from core_triton.torch_build import TorchBuild, torch_build

CUDA_13 = TorchBuild(version="2.13.0+cu130", cuda="13.0")
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The stand-in, as the loader takes it."""
    if COMPILER is None:
        pytest.skip("no C compiler to build the stand-in with")
    target = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return str(target)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine on which a driver is loaded."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 580.65.06\n")
    return tmp_path


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An H100, a T4 and an A100."""
    monkeypatch.setenv("FAKE_DRIVER", "580.65.06")
    monkeypatch.setenv("FAKE_COUNT", "3")
    monkeypatch.setenv("FAKE_ARCHS", "90,75,80")
    monkeypatch.setenv("FAKE_NAMES", "NVIDIA H100 80GB HBM3,Tesla T4,NVIDIA A100-SXM4-80GB")
    monkeypatch.setenv("FAKE_UUIDS", "GPU-11aa,GPU-22bb,GPU-33cc")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_devices_are_listed_and_the_old_chip_is_passed_over(root: Path, library: str, gpus: pytest.MonkeyPatch) -> None:
    found = driver.look(root, library, CUDA_13)
    told = [(device.index, device.arch, device.name) for device in found.devices]
    assert told == [(0, "sm_90", "NVIDIA H100 80GB HBM3"), (1, "sm_80", "NVIDIA A100-SXM4-80GB")]
    assert found.ordinals == (0, 2), "torch counts the T4 too"
    assert all(device.memory_bytes == 80 * 2**30 for device in found.devices)
    assert {device.sdk for device in found.devices} == {"driver 580.65.06"}
    [reason] = found.passed_over
    assert "Tesla T4 is sm_75" in reason and "sm_90" in reason and "--device" in reason


@pytest.mark.parametrize(
    ("wish", "archs", "ordinals"),
    [
        ("2", ["sm_80"], (0,)),
        ("2,0", ["sm_80", "sm_90"], (0, 1)),
        ("GPU-33,1", ["sm_80"], (0,)),
        ("0,9,2", ["sm_90"], (0,)),
    ],
)
def test_visible_devices_are_those_of_cuda(
    root: Path, library: str, gpus: pytest.MonkeyPatch, wish: str, archs: list[str], ordinals: tuple[int, ...]
) -> None:
    gpus.setenv("CUDA_VISIBLE_DEVICES", wish)
    found = driver.look(root, library, CUDA_13)
    assert [device.arch for device in found.devices] == archs
    assert found.ordinals == ordinals


def test_hidden_devices_are_said_to_be(root: Path, library: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("CUDA_VISIBLE_DEVICES", "")
    found = driver.look(root, library, CUDA_13)
    assert found.devices == () and found.passed_over == ("CUDA_VISIBLE_DEVICES hides every GPU; unset it",)


def test_a_driver_too_old_for_torch_is_named(root: Path, library: str, gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("FAKE_DRIVER", "550.54.15")
    gpus.setenv("FAKE_CUDA", "12040")
    [reason] = driver.look(root, library, CUDA_13).passed_over
    for words in ("driver 550.54.15 runs CUDA up to 12.4", "built for CUDA 13.0", "install a newer driver"):
        assert words in reason


def test_a_driver_that_does_not_answer_is_told_in_its_own_words(
    root: Path, library: str, gpus: pytest.MonkeyPatch
) -> None:
    gpus.setenv("FAKE_INIT", "18")
    [reason] = driver.look(root, library, CUDA_13).passed_over
    assert "Driver/library version mismatch" in reason and "reboot" in reason


def test_a_missing_library_is_told(root: Path) -> None:
    [reason] = driver.look(root, "libnvidia-ml-that-is-not.so.1", CUDA_13).passed_over
    assert "does not load" in reason and "reinstall the driver" in reason


def test_no_driver_is_told_without_a_look_at_the_library(tmp_path: Path) -> None:
    [reason] = driver.look(tmp_path, "never-loaded.so", CUDA_13).passed_over
    assert reason.startswith("no NVIDIA driver is loaded; install it")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (TorchBuild(version="2.13.0+cpu"), "torch 2.13.0+cpu is built without CUDA"),
        (TorchBuild(), "torch is not installed"),
    ],
)
def test_a_torch_without_cuda_is_told(root: Path, build: TorchBuild, words: str) -> None:
    [reason] = driver.look(root, "never-loaded.so", build).passed_over
    assert words in reason and "install a build of torch for CUDA" in reason


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    code = (
        "import sys; from core_triton.torch_build import torch_build; print(torch_build())\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    assert f"version='{torch.__version__}'" in done.stdout
    assert (torch_build().cuda or None) == torch.version.cuda


def test_the_plugin_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys, core_cuda.plugin, core_rocm.plugin\n"
        "[[cuda], [rocm]] = core_cuda.plugin.core_backends(), core_rocm.plugin.core_backends()\n"
        "assert (cuda.name, rocm.name) == ('cuda', 'rocm')\n"
        "assert not {'torch', 'triton'} & sys.modules.keys(), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
