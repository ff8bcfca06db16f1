"""Makes the environment in which torch_npu is importable: this one's packages, and the wheel beside them.

Run as a program it prints the interpreter, or runs `core ARGS` in it on a simulated NPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

__all__ = ["TORCH_NPU", "NoEnvironment", "npu_python", "simulated"]

TORCH_NPU = "torch_npu==2.13.0"
"""The wheel; its version equals that of torch."""
_FOLDER = Path(__file__).resolve().parents[3] / ".nox" / "ascend"
_INSTALL_TIMEOUT_S = 180


class NoEnvironment(Exception):
    """It cannot be made here; says why."""


def npu_python() -> Path:
    """The interpreter, made where it is missing.

    Raises:
        NoEnvironment: the wheel cannot be had, or there is no compiler for the stand-ins of CANN.
    """
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise NoEnvironment(f"no {tool}, which builds stand-ins of CANN; install gcc and binutils")
    python = _FOLDER / "bin" / "python"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = _FOLDER / "lib" / f"python{version}" / "site-packages"
    if not python.exists() or not site.is_dir():
        _run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(_FOLDER)])
    # Editable installs are lines of .pth files, which only a site folder has read.
    shared = [sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in sorted(set(shared))]
    (site / "shared.pth").write_text("".join(lines), encoding="utf-8")
    if not (site / "torch_npu").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--target", str(site), TORCH_NPU])
    return python


def simulated(soc: str = "Ascend910B3") -> dict[str, str]:
    """The variables of a process with a simulated NPU."""
    return {**os.environ, "CORE_ASCEND_SIMULATE": soc, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoEnvironment(f"{TORCH_NPU} could not be installed within {_INSTALL_TIMEOUT_S} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoEnvironment(f"{TORCH_NPU} could not be installed: {last}")


def main() -> int:
    """Prints the interpreter, or runs `core ARGS` in it on a simulated NPU."""
    python = npu_python()
    if sys.argv[1:2] != ["core"]:
        print(python)
        return 0
    return subprocess.run([str(python), "-m", "core.cli", *sys.argv[2:]], env=simulated(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
