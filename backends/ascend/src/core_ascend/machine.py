"""What this machine has: device nodes, driver, SDK and chips, read from files. No context, no torch, no vendor library.

Every path is below a root that tests replace (`CORE_ASCEND_ROOT`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from core.spec import DeviceInfo
from core_ascend.chips import chip_named, unsupported_chip

__all__ = ["MIN_DRIVER", "ROOT_ENV", "SIMULATE_ENV", "devices", "has_nodes", "problem", "simulated_socs"]

ROOT_ENV = "CORE_ASCEND_ROOT"
"""Folder under which /dev, /sys and /usr/local are looked for, for tests."""
SIMULATE_ENV = "CORE_ASCEND_SIMULATE"
"""SoC names of simulated devices, as in `CORE_ASCEND_SIMULATE=Ascend910B3`."""
MIN_DRIVER = (24, 1)
"""Oldest driver that the CANN releases of torch_npu 2.8 and later accept."""

_SIMULATED_MEMORY_BYTES = 2**30
_PCI_VENDOR = "0x19e5"
_PCI_CHIPS = {"0xd802": "Ascend910B", "0xd803": "Ascend910_93", "0xd500": "Ascend310P", "0xd801": "Ascend910A"}
_FIRST_OF_FAMILY = {"Ascend910B": "Ascend910B3", "Ascend910_93": "Ascend910_9382", "Ascend310P": "Ascend310P3"}
"""Which SoC stands for a family where only the PCI id is known."""
_SMI_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Board:
    """One row of `npu-smi info`: SoC name, memory in bytes (0 where not told)."""

    soc: str
    memory_bytes: int


def simulated_socs() -> list[str]:
    """The chips that the environment asks to simulate; empty where it asks for none."""
    return [word.strip() for word in os.environ.get(SIMULATE_ENV, "").split(",") if word.strip()]


def has_nodes() -> bool:
    """Whether the kernel driver shows any NPU."""
    return bool(_nodes())


def problem() -> str:
    """Why no device can be opened here, and what to do about it; empty where one can. Reads files alone."""
    wished = simulated_socs()
    if wished:
        unknown = [soc for soc in wished if chip_named(soc) is None]
        if unknown:
            return f"{SIMULATE_ENV}: {unsupported_chip(unknown[0])}"
        return "" if _has_torch_npu() else "a simulated NPU needs the package torch_npu: see docs/ascend.md"
    if not _nodes():
        return "no /dev/davinci* node: install the Ascend driver, or give the container its devices"
    version = _driver_version()
    if version is None:
        return "no driver version under /usr/local/Ascend/driver: install the Ascend driver, or mount that folder"
    if _numbers(version) < MIN_DRIVER:
        least = ".".join(map(str, MIN_DRIVER))
        return f"the Ascend driver is {version}, at least {least} is needed: upgrade driver and firmware"
    if _toolkit() is None:
        return "no CANN toolkit under /usr/local/Ascend: install it and `source` its set_env.sh"
    if not _has_torch_npu():
        return "torch_npu is not installed: `pip install torch_npu` of the version that fits torch"
    known = [_FIRST_OF_FAMILY.get(name) for name in _pci_names()]
    if known and not any(known):
        return unsupported_chip(_pci_names()[0])
    return ""


def devices() -> list[DeviceInfo]:
    """The devices that can be opened; empty where `problem` says why none can. Never raises."""
    if problem():
        return []
    wished = simulated_socs()
    if wished:
        return [_simulated(index, soc) for index, soc in enumerate(wished)]
    boards = _boards() or [_Board(soc=_FIRST_OF_FAMILY.get(n, n), memory_bytes=0) for n in _pci_names()]
    sdk = f"driver {_driver_version()}, CANN {_toolkit()}"
    found = []
    for index, board in enumerate(boards[: len(_nodes())]):
        # The tool of some boards names no more than a generation; the PCI id then tells the family.
        soc = board.soc if chip_named(board.soc) else _FIRST_OF_FAMILY.get(_pci_names()[0] if _pci_names() else "", "")
        chip = chip_named(soc)
        if chip is not None:
            memory = board.memory_bytes or chip.memory_bytes
            found.append(DeviceInfo(index=index, arch=soc, memory_bytes=memory, sdk=sdk, name=f"{soc} NPU"))
    return found


def _simulated(index: int, soc: str) -> DeviceInfo:
    return DeviceInfo(
        index=index,
        arch=soc,
        memory_bytes=_SIMULATED_MEMORY_BYTES,
        sdk="torch_npu over CPU numerics",
        name=f"simulated {soc}",
        simulated=True,
    )


def _has_torch_npu() -> bool:
    return importlib.util.find_spec("torch_npu") is not None


def _root() -> Path:
    return Path(os.environ.get(ROOT_ENV, "/"))


def _nodes() -> list[Path]:
    folder = _root() / "dev"
    try:
        return sorted(path for path in folder.iterdir() if re.fullmatch(r"davinci\d+", path.name))
    except OSError:
        return []


def _driver_version() -> str | None:
    text = _read(_root() / "usr/local/Ascend/driver/version.info")
    found = re.search(r"^\s*Version\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else None


def _toolkit() -> str | None:
    """Version of CANN, from where its environment script points, or from its usual folder."""
    home = os.environ.get("ASCEND_HOME_PATH") if ROOT_ENV not in os.environ else None
    places = [Path(home)] if home else []
    places += [_root() / f"usr/local/Ascend/{name}" for name in ("ascend-toolkit/latest", "cann", "nnae/latest")]
    for place in places:
        for path in (place / "version.cfg", *sorted(place.glob("*/ascend_toolkit_install.info"))):
            found = re.search(r"(\d+\.\d+[.\w]*)", _read(path))
            if found:
                return found.group(1)
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _pci_names() -> list[str]:
    names = []
    for folder in sorted((_root() / "sys/bus/pci/devices").glob("*")):
        if _read(folder / "vendor").strip() == _PCI_VENDOR:
            code = _read(folder / "device").strip()
            if code in _PCI_CHIPS:
                names.append(_PCI_CHIPS[code])
    return names


def _boards() -> list[_Board]:
    """What `npu-smi info` tells of each chip; empty where the tool is missing or says nothing."""
    tool = next(
        (p for p in (_root() / "usr/local/sbin/npu-smi", _root() / "usr/local/bin/npu-smi") if p.exists()), None
    )
    if tool is None:
        return []
    try:
        done = subprocess.run([str(tool), "info"], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return _parse_boards(done.stdout)


def _parse_boards(text: str) -> list[_Board]:
    """Rows of two lines: "| 0  910B3 | OK | ..." and "| 0 | 0000:C1:00.0 | ... used / total |"."""
    boards: list[_Board] = []
    soc = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        head = re.fullmatch(r"\d+\s+(?:Ascend)?(\d{3}\w*)", cells[0])
        if head:
            soc = f"Ascend{head.group(1)}"
        elif soc and len(cells) > 1 and re.fullmatch(r"[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d", cells[1]):
            totals = [int(total) for total in re.findall(r"\d+\s*/\s*(\d+)", line)]
            boards.append(_Board(soc=soc, memory_bytes=max(totals, default=0) * 2**20))
    return boards


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
