"""`nox -s device` end to end on a simulated chip, in small, and its refusal where there is no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_conformance.report.document import read_report

ROOT = Path(__file__).parents[3]


def record(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CORE_CUDA_SIMULATE")
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "device"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**clean, **env})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("device") / "record.json"
    done = record("--quick", "--out", str(place), CORE_CUDA_SIMULATE="sm_90")
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_the_record_is_a_report_that_the_matrix_takes_in(made: Path) -> None:
    report = read_report(made)
    ran = [item for item in report.records if item.ran]
    assert report.ok and len(ran) > 3 and {item.mode for item in ran} == {"SIMULATED"}


def test_every_stage_of_the_record_has_its_figures(made: Path) -> None:
    measured = json.loads(made.read_text(encoding="utf-8"))["measurements"]
    assert measured["simulated"] is True and measured["limits"]["bytes_per_s"] > 0
    assert not [entry for entry in measured["kernels"] if "failed" in entry or "failed_by" in entry]
    for entry in measured["kernels"]:
        assert entry["us"]["ours"] > 0 and entry["us"]["torch"] > 0 and entry["share"] > 0, entry
    names = " ".join(entry["case"] for entry in measured["kernels"])
    assert all(word in names for word in ("rms_norm", "act_mul", "linear", "decode", "prefill", "sample"))
    engine = measured["engine"]
    assert engine["decode_share_of_bandwidth"] > 0 and engine["prefill_share_of_matrix_rate"] > 0
    # Without a device's clock there is no such number, and none is made up.
    assert engine["host_gap_us_per_step"] is None


def test_without_a_device_it_refuses_with_exit_code_2(tmp_path: Path) -> None:
    done = record("--backend", "cuda", "--out", str(tmp_path / "record.json"))
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.strip()
    assert not list(tmp_path.iterdir())
