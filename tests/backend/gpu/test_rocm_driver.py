"""AMD's kernel driver as `probe` sees it: a tree of files as below /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core_rocm import driver
from core_triton.torch_build import TorchBuild

HIP_7 = TorchBuild(version="2.13.0+rocm7.1", hip="7.1.25424")
GIB = 2**30


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def add_node(
    root: Path, number: int, version: int, *, simds: int = 304, banks: tuple[tuple[int, int], ...] = ()
) -> None:
    """A node of the topology; a processor has no SIMDs."""
    node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    (node / "mem_banks").mkdir(parents=True)
    (node / "name").write_text("aqua_vanjaram\n" if simds else "\n")
    (node / "properties").write_text(
        f"cpu_cores_count {0 if simds else 96}\nsimd_count {simds}\ngfx_target_version {version}\n"
    )
    for index, (kind, size) in enumerate(banks):
        (node / f"mem_banks/{index}").mkdir()
        (node / f"mem_banks/{index}/properties").write_text(f"heap_type {kind}\nsize_in_bytes {size}\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two processors, an MI300X, a card that nothing here is built for, and an MI250; node 10 comes after node 2."""
    add_node(tmp_path, 0, 0, simds=0, banks=((0, 512 * GIB),))
    add_node(tmp_path, 1, 0, simds=0)
    add_node(tmp_path, 2, 90402, banks=((1, 192 * GIB), (4, 64 * 1024)))
    add_node(tmp_path, 3, 100306, simds=72, banks=((2, 16 * GIB),))
    add_node(tmp_path, 10, 90010, banks=((2, 64 * GIB),))
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "sys/module/amdgpu/version").write_text("6.14.14\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").write_text("")
    return tmp_path


def test_devices_are_listed_with_their_own_memory(root: Path) -> None:
    found = driver.look(root, HIP_7)
    told = [(device.index, device.arch, device.memory_bytes) for device in found.devices]
    assert told == [(0, "gfx942", 192 * GIB), (1, "gfx90a", 64 * GIB)]
    assert found.ordinals == (0, 2), "torch counts the card between them too"
    assert {device.sdk for device in found.devices} == {"amdgpu 6.14.14"}
    [reason] = found.passed_over
    assert "is gfx1036" in reason and "gfx942" in reason and "--device" in reason


@pytest.mark.parametrize(
    ("version", "arch"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90500, "gfx950"), (110000, "gfx1100"), (120001, "gfx1201")],
)
def test_the_number_of_the_driver_is_the_compilers_word(version: int, arch: str) -> None:
    assert driver.arch_of(version) == arch


@pytest.mark.parametrize(
    ("variables", "archs"),
    [
        ({"HIP_VISIBLE_DEVICES": "2"}, ["gfx90a"]),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["gfx942"]),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "2"}, ["gfx90a"]),
    ],
)
def test_visible_devices_are_those_of_the_runtime(
    root: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], archs: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [device.arch for device in driver.look(root, HIP_7).devices] == archs


def test_hidden_devices_are_said_to_be(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    [reason] = driver.look(root, HIP_7).passed_over
    assert "VISIBLE_DEVICES hides every GPU; unset it" in reason


def test_no_driver_is_told(tmp_path: Path) -> None:
    [reason] = driver.look(tmp_path, HIP_7).passed_over
    assert "amdgpu" in reason and "install it" in reason


def test_a_container_without_the_device_is_told_how_to_start(root: Path) -> None:
    (root / "dev/kfd").unlink()
    [reason] = driver.look(root, HIP_7).passed_over
    assert "--device /dev/kfd" in reason


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open every file")
def test_a_user_without_the_group_is_told(root: Path) -> None:
    (root / "dev/kfd").chmod(0)
    [reason] = driver.look(root, HIP_7).passed_over
    assert "group render" in reason


def test_a_torch_without_rocm_is_told(root: Path) -> None:
    [reason] = driver.look(root, TorchBuild(version="2.13.0+cu130", cuda="13.0")).passed_over
    assert "torch 2.13.0+cu130 is built without ROCm" in reason and "install a build of torch for ROCm" in reason


def test_a_driver_with_nothing_to_show_is_told(tmp_path: Path) -> None:
    add_node(tmp_path, 0, 0, simds=0)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").write_text("")
    [reason] = driver.look(tmp_path, HIP_7).passed_over
    assert "no GPU that this user may see" in reason
