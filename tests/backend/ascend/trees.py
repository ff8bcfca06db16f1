"""Folders that look like a machine with NPUs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

__all__ = ["SMI_310P", "SMI_910B", "plant"]

SMI_910B = """cat <<'TABLE'
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0.3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 91.2        36                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3361 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 90.0        37                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3361 / 65536         |
+===========================+===============+====================================================+
TABLE"""
SMI_310P = """cat <<'TABLE'
| 4     310P3               | OK            | NA          45                0     / 0            |
| 0     0                   | 0000:01:00.0  | 0           1692  / 21527                          |
TABLE"""


def plant(
    root: Path,
    *,
    nodes: int = 1,
    driver: str = "24.1.0.3",
    cann: str = "8.3.1",
    pci: Sequence[str] = (),
    smi: str = "",
) -> None:
    """Makes the tree anew.

    Args:
        root: An empty folder, or one that this function made.
        nodes: Device nodes.
        driver: Version of the driver; empty for none.
        cann: Version of the toolkit; empty for none.
        pci: Device ids of the vendor on the bus.
        smi: What the tool does, in shell; empty for no tool.
    """
    for name in ("dev", "sys", "usr"):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "dev").mkdir(parents=True)
    for index in range(nodes):
        (root / "dev" / f"davinci{index}").touch()
    (root / "dev" / "davinci_manager").touch()
    if driver:
        _write(root / "usr/local/Ascend/driver/version.info", f"Version={driver}\npackage_version={driver}\n")
    if cann:
        _write(root / "usr/local/Ascend/ascend-toolkit/latest/version.cfg", f"runtime_running_version=[{cann}]\n")
    for index, device in enumerate(pci):
        folder = root / f"sys/bus/pci/devices/0000:0{index}:00.0"
        _write(folder / "vendor", "0x19e5\n")
        _write(folder / "device", f"{device}\n")
    if smi:
        tool = root / "usr/local/sbin/npu-smi"
        _write(tool, f"#!/bin/sh\n{smi}\n")
        tool.chmod(0o755)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
