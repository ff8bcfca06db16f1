"""NVIDIA devices as the driver lists them, through its management library: no context, and neither torch nor CUDA."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.spec import DeviceInfo
from core_triton.probing import Found, sort_out
from core_triton.torch_build import TorchBuild, torch_build

__all__ = ["LIBRARY", "absence", "look", "visible_indices"]

LIBRARY = "libnvidia-ml.so.1"
"""NVIDIA's management library, which the driver brings."""
_DRIVER_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
"""One of them is there wherever a driver is loaded: Linux, containers, WSL."""
_WORD = 96


def absence(root: Path = Path("/"), build: TorchBuild | None = None) -> str:
    """Why there can be no device, from files alone, ending with what to do; empty where there may be one."""
    build = torch_build() if build is None else build
    if not any((root / name).exists() for name in _DRIVER_FILES):
        return "no NVIDIA driver is loaded; install it, and in a container start it with access to the GPUs"
    if not build.cuda:
        have = f"torch {build.version} is built without CUDA" if build.version else "torch is not installed"
        return f"{have}; install a build of torch for CUDA (pytorch.org lists them)"
    return ""


def look(root: Path = Path("/"), library: str = LIBRARY, build: TorchBuild | None = None) -> Found:
    """The devices that this torch can open on this machine. Never raises."""
    build = torch_build() if build is None else build
    reason = absence(root, build)
    if reason:
        return Found(passed_over=(reason,))
    try:
        nvml = ctypes.CDLL(library)
    except OSError as error:
        return Found(passed_over=(f"the driver's {library} does not load ({error}); reinstall the driver",))
    code = nvml.nvmlInit_v2()
    if code:
        return Found(passed_over=(f"the driver does not answer ({_words(nvml, code)}); see nvidia-smi, or reboot",))
    try:
        return _list(nvml, build)
    finally:
        nvml.nvmlShutdown()


def _list(nvml: ctypes.CDLL, build: TorchBuild) -> Found:
    driver, newest = _text(nvml.nvmlSystemGetDriverVersion), _number(nvml.nvmlSystemGetCudaDriverVersion_v2)
    if newest and newest // 1000 < int(build.cuda.partition(".")[0]):
        reason = (
            f"driver {driver} runs CUDA up to {newest // 1000}.{newest % 1000 // 10} and torch {build.version} is "
            f"built for CUDA {build.cuda}; install a newer driver, or a torch for CUDA {newest // 1000}"
        )
        return Found(passed_over=(reason,))
    seen = [_device(nvml, index, driver) for index in range(_number(nvml.nvmlDeviceGetCount_v2))]
    visible = visible_indices([uuid for _, uuid in seen], os.environ.get("CUDA_VISIBLE_DEVICES"))
    return sort_out("cuda", [device for device, _ in seen], visible, "CUDA_VISIBLE_DEVICES")


def visible_indices(uuids: Sequence[str], wish: str | None) -> list[int]:
    """What the driver shows to CUDA, in CUDA's order: numbers or beginnings of UUIDs, up to the first that is neither.

    Args:
        uuids: Of all devices.
        wish: The variable; None where it is not set.
    """
    if wish is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for word in (part.strip() for part in wish.split(",")):
        if word.isdecimal() and int(word) < len(uuids):
            found.append(int(word))
        elif word.startswith("GPU-") and sum(uuid.startswith(word) for uuid in uuids) == 1:
            found.append(next(index for index, uuid in enumerate(uuids) if uuid.startswith(word)))
        else:
            break
    return found


def _device(nvml: ctypes.CDLL, index: int, driver: str) -> tuple[DeviceInfo, str]:
    """The device and its UUID."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    device = DeviceInfo(
        index=index,
        arch=f"sm_{major.value}{minor.value}",
        memory_bytes=int(memory[0]),
        sdk=f"driver {driver}",
        name=_text(nvml.nvmlDeviceGetName, handle),
    )
    return device, _text(nvml.nvmlDeviceGetUUID, handle)


def _text(call: Any, *args: Any) -> str:
    """What a call writes into a buffer; empty where it fails."""
    buffer = ctypes.create_string_buffer(_WORD)
    return "" if call(*args, buffer, ctypes.c_uint(_WORD)) else buffer.value.decode("utf-8", "replace")


def _number(call: Any) -> int:
    """What a call writes into an int; 0 where it fails."""
    number = ctypes.c_int()
    return 0 if call(ctypes.byref(number)) else number.value


def _words(nvml: ctypes.CDLL, code: int) -> str:
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    text = nvml.nvmlErrorString(code)
    return text.decode("utf-8", "replace") if text else f"error {code}"
