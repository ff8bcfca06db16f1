"""Every instruction-set level that this machine can run passes the same kernel tests, and forcing one works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_cpu import _kernels

HERE = Path(__file__).parent
LEVELS = ["scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "emulated_bf16"]
QUICK = (
    "(paged and (mixed or window_odd or dim_80 or sinks_window)) or self_bf16 or "
    "(gguf and (q8_0 or q4_0 or q4_1 or q5_k or q6_k)) "
    "or (fp8 and 37) or (int8_is and 37) or (dense_weights and 37) or (act_mul and 37) or (rope and 80) or "
    "(rms_norm and 77) or (shared_noise and 300) or (same_bits and batch)"
)


def run(level: str, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"CORE_CPU_ISA": level}
    return subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=HERE.parents[2],
        check=False,
    )


def require(level: str) -> None:
    if level not in _kernels.isa_levels():
        pytest.skip(f"this machine or this build has no {level}; it has {', '.join(_kernels.isa_levels())}")


def test_the_best_level_of_the_machine_is_taken_unless_another_is_named() -> None:
    automatic = [level for level in _kernels.isa_levels() if level != "emulated_bf16"]
    assert _kernels.isa() == os.environ.get("CORE_CPU_ISA", automatic[-1])


@pytest.mark.parametrize("level", LEVELS)
def test_the_kernels_are_right_on_every_level(level: str) -> None:
    require(level)
    if level == _kernels.isa():
        pytest.skip(f"{level} is the level of this very run")
    if "CORE_CPU_ISA" in os.environ:
        pytest.skip("a level is forced already: this run is one of those")
    files = [str(path) for path in HERE.glob("test_kernels_*.py") if path.name != Path(__file__).name]
    result = run(level, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", QUICK, *files)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


def test_a_level_that_is_not_there_is_refused_by_name() -> None:
    result = run("avx1024", "-c", "import core_cpu._kernels")
    assert result.returncode != 0
    assert "instruction set 'avx1024' is not built in or not on this machine" in result.stderr
