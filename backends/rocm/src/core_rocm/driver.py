"""AMD devices as the kernel driver lists them below /sys: no context, and neither torch nor ROCm."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from core.spec import DeviceInfo
from core_triton.probing import Found, sort_out
from core_triton.torch_build import TorchBuild, torch_build

__all__ = ["absence", "arch_of", "look", "visible_indices"]

_NODES = "sys/class/kfd/kfd/topology/nodes"
_DEVICE_FILE = "dev/kfd"
_LOCAL_HEAPS = (1, 2)
"""Kinds of memory bank that are the device's own: mapped for the host, or private."""


def absence(root: Path = Path("/"), build: TorchBuild | None = None) -> str:
    """Why there can be no device, from files alone, ending with what to do; empty where there may be one."""
    build = torch_build() if build is None else build
    if not (root / _NODES).is_dir():
        return "the kernel driver amdgpu with its compute part is not loaded; install it and load it"
    if not (root / _DEVICE_FILE).exists():
        return "there is no /dev/kfd; in a container start it with --device /dev/kfd --device /dev/dri"
    if not os.access(root / _DEVICE_FILE, os.R_OK | os.W_OK):
        return "/dev/kfd may not be opened by this user; add them to the group render"
    if not build.hip:
        have = f"torch {build.version} is built without ROCm" if build.version else "torch is not installed"
        return f"{have}; install a build of torch for ROCm (pytorch.org lists them)"
    return ""


def look(root: Path = Path("/"), build: TorchBuild | None = None) -> Found:
    """The devices that this torch can open on this machine. Never raises."""
    build = torch_build() if build is None else build
    reason = absence(root, build)
    if reason:
        return Found(passed_over=(reason,))
    version = _read(root / "sys/module/amdgpu/version").strip()
    sdk = f"amdgpu {version}" if version else "amdgpu"
    nodes = sorted((root / _NODES).iterdir(), key=lambda node: (len(node.name), node.name))
    seen = [device for node in nodes for device in _device(node, sdk)]
    return sort_out("hip", seen, _visible(len(seen)), "ROCR_, HIP_ or CUDA_VISIBLE_DEVICES")


def arch_of(version: int) -> str:
    """The compiler's word for the driver's number: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def visible_indices(indices: Sequence[int], wish: str | None) -> list[int]:
    """What one variable leaves of the devices, in its order; words up to the first that is no number of a device.

    Devices named by UUID are left to the driver: none is listed then.

    Args:
        indices: Devices that are left so far.
        wish: The variable; None where it is not set.
    """
    if wish is None:
        return list(indices)
    found: list[int] = []
    for word in (part.strip() for part in wish.split(",")):
        if not word.isdecimal() or int(word) >= len(indices):
            break
        found.append(indices[int(word)])
    return found


def _visible(count: int) -> list[int]:
    """The runtime's own variable hides first; HIP's counts what that left."""
    left = visible_indices(range(count), os.environ.get("ROCR_VISIBLE_DEVICES"))
    hip = os.environ.get("HIP_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    return visible_indices(left, hip)


def _device(node: Path, sdk: str) -> list[DeviceInfo]:
    """The GPU of a node; empty for a processor, and for one that another container owns."""
    facts = _facts(node / "properties")
    version = facts.get("gfx_target_version", 0)
    if not facts.get("simd_count") or not version:
        return []
    banks = [_facts(bank / "properties") for bank in sorted((node / "mem_banks").glob("*"))]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _LOCAL_HEAPS)
    name = _read(node / "name").strip() or "AMD GPU"
    return [DeviceInfo(index=0, arch=arch_of(version), memory_bytes=memory, sdk=sdk, name=name)]


def _facts(path: Path) -> Mapping[str, int]:
    """The "name number" lines of a file of the driver."""
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
