"""`core conformance`, and the first two levels on every installed backend of this repository."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "core.cli", "conformance"]
INSTALLED = {entry.name for entry in entry_points(group="core.backends")}


def core(*args: str, timeout: float = 380) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=timeout, check=False)


def test_list_names_every_id_up_to_a_level() -> None:
    listed = core("list", "--level", "L1").stdout.split()
    assert "L0/probe-cheap" in listed and "L1/attention/counting-full-bf16" in listed
    assert not [check_id for check_id in listed if check_id.startswith(("L2", "L3"))]
    assert core("list", "-k", "L2/mixed").stdout.split() == [i for i in core("list").stdout.split() if "L2/mixed" in i]


def test_an_unknown_backend_is_one_line_and_exit_code_2() -> None:
    done = core("run", "--backend", "nosuch", "--level", "L0")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "nosuch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_selection_that_no_id_meets_is_said() -> None:
    for args in (["run", "--backend", "reference", "--level", "L0"], ["list"]):
        done = core(*args, "-k", "zzznomatch")
        assert done.returncode == 2 and "zzznomatch" in done.stderr and "Traceback" not in done.stderr


def test_what_cannot_be_written_is_said_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("", encoding="utf-8")
    done = core("run", "--backend", "reference", "--level", "L0", "--report-dir", str(tmp_path / "taken"))
    assert done.returncode == 2 and "is a file" in done.stderr and not done.stdout
    assert core("run", "--backend", "reference", "--check-timeout", "inf").returncode == 2


def test_help_lists_the_commands() -> None:
    done = core("--help")
    assert done.returncode == 0 and "run" in done.stdout and "list" in done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["sim", "cpu"])
def test_levels_0_to_3(backend: str, tmp_path: Path) -> None:
    if backend not in INSTALLED:
        pytest.skip(f"core-backend-{backend} is not installed; pip install -e backends/{backend}")
    done = core("run", "--backend", backend, "--level", "L3", "--report-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    records = document["records"]
    assert document["run"]["backend"] == backend and len(records) > 400
    mode = "SIMULATED" if backend == "sim" else "VALIDATED"
    assert {record["mode"] for record in records} == {mode}
    assert {record["outcome"] for record in records} <= {"PASS", "UNSUPPORTED"}
    assert any(record["kinds"].get("attention") == "NATIVE" and record["ratio"] for record in records)
