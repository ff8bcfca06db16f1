"""One record of a device in at most eight minutes: probe, conformance L0 to L3, kernels, a model, shares of the limits.

    python benchmarks/device --backend cuda [--out device-record.json] [--quick]

The record is a `report.json` of the conformance suite with "measurements" beside its records, so that `core
conformance report` takes it into the matrix. What the time did not suffice for is NOT_RUN in it.

Exit code 0: everything that ran is acceptable. 1: something is not. 2: there is no such device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stopwatch import best_seconds

from core.errors import CoreError
from core.spec import DType
from core_conformance.served.roofline import Roofline, measure_roofline
from core_conformance.subject import Subject
from core_conformance.target import Target, load_target
from core_triton.roofline import CHIPS, Chip

MINUTES = 8
_RESERVE_S = 20
"""For what comes behind the suite: its report, and the record."""
_QUICK_CHECKS = "L1/act_mul*"


def main() -> int:
    """Runs all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", help="NAME or NAME:INDEX (cuda)")
    parser.add_argument("--out", type=Path, default=Path("device-record.json"), help="the record")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and a few checks: does it run end to end?")
    arguments = parser.parse_args()
    begin = time.monotonic()
    try:
        target = load_target(arguments.backend)
        device = target.device
    except CoreError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if any(os.environ.get(name) != value for name, value in target.info.env.items()):
        # As the core starts a backend's process: what SDKs read at start has to be there before.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **target.info.env})
    _say(f"{device.name or device.arch}, {device.sdk}{', simulated' if device.simulated else ''}")
    measured: dict[str, Any] = {"device": device.arch, "simulated": device.simulated, "quick": arguments.quick}
    with tempfile.TemporaryDirectory() as folder:
        _measure(target, arguments, Path(folder), measured)
        left = MINUTES * 60 - (time.monotonic() - begin) - _RESERVE_S
        report, code = _conformance(arguments, Path(folder) / "report", left)
    measured["seconds"] = round(time.monotonic() - begin, 1)
    arguments.out.write_text(json.dumps({**report, "measurements": measured}, indent=1) + "\n", encoding="utf-8")
    _say(f"{arguments.out}: {measured['seconds']} s; `core conformance report {arguments.out}` shows its matrix")
    return code


def _measure(target: Target, arguments: argparse.Namespace, folder: Path, measured: dict[str, Any]) -> None:
    from engine_times import measure_engine
    from kernel_times import measure_kernels

    limits = _limits(target)
    chip = Chip(
        name="measured",
        backend=target.name,
        arch=target.device.arch,
        bandwidth=limits.bytes_per_s,
        rates={"bfloat16": limits.flops_per_s},
        source="measured in this run",
    )
    published = {name: one.bandwidth for name, one in CHIPS.items() if one.arch == target.device.arch}
    measured["limits"] = {
        "bytes_per_s": limits.bytes_per_s,
        "flops_per_s": limits.flops_per_s,
        "by": [limits.bytes_by, limits.flops_by],
        "published_bytes_per_s": published,
    }
    _say(f"{limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e12:.3f} TFLOP/s measured")
    kernels = _stage("kernels", lambda: measure_kernels(Subject(target), chip, quick=arguments.quick))
    measured["kernels"] = kernels
    target.close()
    model = folder / "model"
    measured["engine"] = _stage("engine", lambda: measure_engine(arguments.backend, chip, model, quick=arguments.quick))


def _limits(target: Target) -> Roofline:
    """What the device can do; of a simulated one what torch does on the host, which says nothing of the chip."""
    if not target.device.simulated:
        return measure_roofline(target, DType.BFLOAT16, megabytes=1024)
    x, y = torch.zeros(256, 256), torch.zeros(256, 256)
    copy, product = (best_seconds(work, lambda: None, repeats=3) for work in (lambda: y.copy_(x), lambda: x @ x))
    return Roofline(2.0 * x.nbytes / copy, 2.0 * 256**3 / product, "host copy", "host product")


def _stage(name: str, work: Callable[[], Any]) -> Any:
    """The stage's result; a failure is part of the record, and the others still run."""
    begin = time.monotonic()
    try:
        found = work()
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"}
    _say(f"{name}: {time.monotonic() - begin:.1f} s")
    return found


def _conformance(arguments: argparse.Namespace, folder: Path, seconds: float) -> tuple[dict[str, Any], int]:
    """The suite's report and exit code; interrupted when the time is up, with what ran until then."""
    what = ["--level", "L1", "-k", _QUICK_CHECKS] if arguments.quick else ["--level", "L3"]
    command = [sys.executable, "-m", "core.cli", "conformance", "run", "--backend", arguments.backend, *what]
    process = subprocess.Popen([*command, "--report-dir", str(folder)])
    try:
        code = process.wait(max(seconds, 30))
    except subprocess.TimeoutExpired:
        _say("conformance: time is up, the rest is NOT_RUN")
        process.send_signal(signal.SIGINT)
        code = process.wait(_RESERVE_S)
    place = folder / "report.json"
    if not place.exists():
        raise SystemExit(f"core conformance ended with {code} and wrote no report; run it by hand to see why")
    report: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    bad = [record for record in report["records"] if record["outcome"] in ("FAIL", "ERROR")]
    return report, 1 if bad else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
