"""The one build on processors that this machine is not: qemu stands in for them and traps what they do not have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from core_cpu import _kernels

QEMU = shutil.which("qemu-x86_64")
PROBE = Path(__file__).parents[3] / "backends/cpu/tools/probe_isa.py"


@pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (package qemu-user)")
@pytest.mark.parametrize(("processor", "level"), [("Haswell", "avx2"), ("Nehalem", "scalar"), ("qemu64", "scalar")])
def test_an_older_processor_gets_its_own_level_and_the_right_numbers(processor: str, level: str) -> None:
    command = [str(QEMU), "-cpu", processor, str(Path(sys.executable).resolve()), str(PROBE), _kernels.__file__]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(f"level {level};")
