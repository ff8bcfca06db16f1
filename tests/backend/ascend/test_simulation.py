"""The simulated NPU, in the environment with torch_npu: the tests of `simulated`, and one engine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from npu_environment import simulated

SIMULATED = Path(__file__).parent / "simulated"
FLAGS = ("-q", "-x", "-p", "no:cacheprovider", "--import-mode=prepend", "--rootdir", str(SIMULATED), "-c", "/dev/null")


@pytest.mark.timeout(300)
def test_calls_numerics_faults_graphs_and_mutants_on_the_simulated_npu(npu_python: Path) -> None:
    done = subprocess.run(
        [str(npu_python), "-m", "pytest", *FLAGS, str(SIMULATED)],
        env=simulated(), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout


@pytest.mark.timeout(200)
def test_a_tiny_model_says_the_same_through_the_conformance_suite(npu_python: Path) -> None:
    selection = ("--level", "L3", "-k", "L3/greedy-half/copy")
    done = subprocess.run(
        [str(npu_python), "-m", "core.cli", "conformance", "run", "--backend", "ascend", *selection],
        env=simulated(), capture_output=True, text=True, timeout=190, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ascend L3 (SIMULATED)" in done.stdout and "1 PASS" in done.stdout, done.stdout
