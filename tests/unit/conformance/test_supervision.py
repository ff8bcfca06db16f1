"""Checks run in a process of their own: what hangs or dies is named, and the report of the rest survives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import BackendNotFoundError, BackendUnavailableError
from core_conformance import Outcome, run_supervised
from core_conformance.must_pass_lists import must_pass

Install = Callable[[str], None]
LIKE_THE_REFERENCE = """
import ctypes
import time
import torch
from core_conformance.bare import BareBackend


class Acme(BareBackend):
    def copy_blocks(self, *args, **kwargs):
        super().copy_blocks(*args, **kwargs)
        {fault}
"""
# PyDLL keeps the interpreter locked while C sleeps: no thread of the process can run any Python.
LOCKED = "ctypes.PyDLL(None).sleep(300)"


def outcome(records: dict[str, tuple[Outcome, str]], check_id: str) -> Outcome:
    return records[check_id][0]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (LOCKED, "did not return within 8 s in copy_blocks (acme_backend.py:"),
        ("ctypes.string_at(0)", "ended the process: signal SIGSEGV in string_at (__init__.py:"),
        ("import os; os._exit(3)", "ended the process: exit code 3"),
    ],
    ids=["hangs-in-c", "crashes", "exits"],
)
def test_a_check_that_never_returns_is_a_failure_with_its_place(
    install_backend: Install, fault: str, words: str
) -> None:
    install_backend(LIKE_THE_REFERENCE.format(fault=fault))
    seen = []
    skip = set(must_pass(["L0"])) - {"L0/arena-round-trip", "L0/copy-blocks", "L0/reopen", "L0/memory"}
    report = run_supervised("acme", ["L0"], skip=skip, progress=seen.append, check_timeout_s=8)
    records = {record.id: (record.outcome, record.reason) for record in report.records}
    assert records.keys() == set(must_pass(["L0"])) and not report.ok
    assert outcome(records, "L0/copy-blocks") is Outcome.FAIL, report.summary()
    assert words in records["L0/copy-blocks"][1]
    if "exit code" not in words:
        assert "called from test_l0_memory.py:" in records["L0/copy-blocks"][1]
    before = [record.id for record in seen if record.outcome is Outcome.PASS]
    assert before, "what ran before it is kept"
    behind = [text for found, text in records.values() if found is Outcome.NOT_RUN and "ended at" in text]
    assert behind == ["the run ended at L0/copy-blocks"] * len(behind) and behind
    assert report.facts.backend == "acme" and report.facts.package.name == "acme"


def test_a_backend_that_cannot_be_probed_in_time_is_unavailable(install_backend: Install) -> None:
    source = LIKE_THE_REFERENCE.format(fault="pass") + f"\n    def probe(self):\n        {LOCKED}\n"
    install_backend(source)
    with pytest.raises(BackendUnavailableError, match="probing its device: it did not return within 4 s"):
        run_supervised("acme", ["L0"], stage_timeout_s=4)


def test_a_refusal_of_the_worker_keeps_its_words_and_exit_code() -> None:
    with pytest.raises(Exception, match="nosuch") as caught:
        run_supervised("nosuch", ["L0"])
    assert getattr(caught.value, "exit_code", None) == BackendNotFoundError.exit_code


def test_the_command_ends_with_a_report_and_exit_code_1(install_backend: Install, tmp_path: Path) -> None:
    install_backend(LIKE_THE_REFERENCE.format(fault="import os; os.abort()"))
    command = [sys.executable, "-m", "core.cli", "conformance", "run", "--backend", "acme", "--level", "L0"]
    command += ["-k", "copy-blocks", "--report-dir", str(tmp_path / "out"), "--check-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "FAIL    L0/copy-blocks: it ended the process: signal SIGABRT" in done.stdout
    document = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert {record["outcome"] for record in document["records"]} == {"FAIL", "NOT_RUN"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_run_reports_what_ran(install_backend: Install, tmp_path: Path, number: signal.Signals) -> None:
    """The check that it was at is no failure; whoever reads the output to its end does not wait."""
    install_backend(LIKE_THE_REFERENCE.format(fault=LOCKED))
    command = [sys.executable, "-m", "core.cli", "conformance", "run", "--backend", "acme", "--level", "L0"]
    command += ["-k", "L0/*o*", "-v", "--report-dir", str(tmp_path / "out")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert "PASS" in run.stdout.readline()
    run.send_signal(number)
    told, errors = run.communicate(timeout=60)
    assert run.returncode == 1 and "Traceback" not in errors, errors
    assert "was interrupted" in told and "FAIL" not in told
    document = json.loads((tmp_path / "out/report.json").read_text(encoding="utf-8"))
    assert {record["outcome"] for record in document["records"]} == {"PASS", "NOT_RUN"}
