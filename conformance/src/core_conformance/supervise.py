"""Runs the suite in a process of its own, so that a check which hangs or kills it still ends in a report."""

from __future__ import annotations

import datetime
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import BackendUnavailableError, CoreError
from core.plugins import list_backends
from core.spec import BackendInfo, DeviceInfo
from core_conformance.must_pass_lists import must_pass
from core_conformance.records import Mode, Outcome, Record
from core_conformance.report.document import Report
from core_conformance.report.facts import gather_facts
from core_conformance.served.options import SOAK_SECONDS
from core_conformance.served.reaper import watched
from core_conformance.waivers import Waiver, apply_waivers

__all__ = ["CHECK_TIMEOUT_S", "STAGE_TIMEOUT_S", "run_supervised"]

CHECK_TIMEOUT_S = 600.0
"""Seconds that one check may take."""
STAGE_TIMEOUT_S = 300.0
"""Seconds that loading, probing, collecting and closing may each take."""
_LAST_WORDS_S = 10.0
_INTERRUPTED = "was interrupted"
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.+)')


class _RefusedError(CoreError):
    """An error that the worker met, with its own exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class _Progress:
    """What the worker has said so far."""

    stage: str = "starting"
    check_id: str = ""
    target: dict[str, Any] | None = None
    records: dict[str, Record] = field(default_factory=dict)
    problems: list[str] | None = None


def run_supervised(
    backend: str,
    levels: Sequence[str],
    *,
    selection: str = "",
    skip: Collection[str] = (),
    shard: str = "",
    models: Sequence[str] = (),
    checkpoints: Sequence[tuple[str, str]] = (),
    soak_seconds: float = SOAK_SECONDS,
    progress: Callable[[Record], None] = lambda record: None,
    waivers: Sequence[Waiver] = (),
    check_timeout_s: float = CHECK_TIMEOUT_S,
    stage_timeout_s: float = STAGE_TIMEOUT_S,
) -> Report:
    """Runs the checks of these levels, and the package's own cases, against an installed backend.

    A check that does not return in time, even in C code with the interpreter locked, or that kills the process becomes
    a FAIL with the place where it was; the ids behind it become NOT_RUN.

    Args:
        backend: NAME or NAME:INDEX, or "reference".
        levels: "L0" to "L4".
        selection: Run only ids that hold this text, or match it where it has a `*`.
        skip: Ids that are left out besides.
        shard: Which part of a run this is ("2/3"), for the report.
        models: The models that were asked for, for the report; empty for all.
        checkpoints: (folder, dtype) of further models to run; the accuracy checks of L4 take the first one.
        soak_seconds: How long the soak of L4 goes on.
        progress: Called with each record.
        waivers: Turn FAIL into WAIVED.
        check_timeout_s: Seconds that one check may take.
        stage_timeout_s: Seconds that loading, collecting and closing may each take.

    Raises:
        BackendNotFoundError: nothing of that name is installed.
        BackendUnavailableError: it cannot be loaded, or finds no device.
        KeyboardInterrupt: before anything is known of the device; later one ends the run, and what ran is reported.
    """
    begun, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        order: dict[str, Any] = {
            "backend": backend,
            "levels": list(levels),
            "selection": selection,
            "skip": sorted(skip),
        }
        order |= {"trace": str(trace), "checkpoints": list(checkpoints), "soak_seconds": soak_seconds}
        said = _Progress()
        ending = _supervise(order, said, progress, check_timeout_s, stage_timeout_s)
        if ending:
            _note_ending(said, ending, _place(trace), levels, progress)
    assert said.target is not None
    facts = gather_facts(
        BackendInfo(**{**said.target["info"], "api": tuple(said.target["info"]["api"])}),
        DeviceInfo(**said.target["device"]),
        package=said.target["package"],
        levels=levels,
        selection=selection,
        shard=shard,
        models=models,
        waivers=waivers,
        date=begun,
        seconds=time.monotonic() - start,
    )
    records = sorted(said.records.values(), key=lambda record: record.id)
    return Report(facts, apply_waivers(records, waivers, facts.backend, facts.device.arch), said.problems or [])


def _supervise(
    order: dict[str, Any], said: _Progress, progress: Callable[[Record], None], check_s: float, stage_s: float
) -> str:
    """Follows the worker to its end; returns what cut it short, empty where nothing did."""
    source, sink = os.pipe()
    # -P: a folder named `core` where the user stands must not take the place of the installed package.
    command = [sys.executable, "-P", "-m", "core_conformance.worker", json.dumps({**order, "pipe": sink})]
    env = {**os.environ, **_environment(order["backend"])}
    worker = subprocess.Popen(command, pass_fds=(sink,), start_new_session=True, env=env)
    os.close(sink)
    watch = ExitStack()
    watch.enter_context(watched(worker.pid))
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(source, lines), daemon=True).start()
    try:
        while said.problems is None:
            limit = check_s if said.check_id else stage_s
            try:
                line = lines.get(timeout=limit)
            except queue.Empty:
                return f"did not return within {limit:g} s"
            if line is None:
                return f"ended the process: {_exit_words(worker)}"
            _take(json.loads(line), said, progress)
        return ""
    except KeyboardInterrupt:
        if said.target is None:
            raise
        return _INTERRUPTED
    finally:
        _end(worker, ask=said.problems is None)
        watch.close()


def _environment(backend: str) -> Mapping[str, str]:
    """What a process of the backend must start with; whatever is wrong with the backend, the worker says so."""
    name = backend.partition(":")[0]
    return next((item.info.env for item in list_backends() if item.info and item.name == name), {})


def _read(source: int, lines: queue.Queue[str | None]) -> None:
    with os.fdopen(source, encoding="utf-8") as pipe:
        for line in pipe:
            if line.endswith("\n"):
                lines.put(line)
    lines.put(None)


def _take(line: dict[str, Any], said: _Progress, progress: Callable[[Record], None]) -> None:
    [(kind, value)] = line.items()
    if kind == "stage":
        said.stage, said.check_id = value, ""
    elif kind == "begin":
        said.check_id = value
    elif kind == "target":
        said.target = value
    elif kind == "record":
        _add(Record.from_dict(value), said, progress)
    elif kind == "problems":
        said.problems = value
    else:
        raise _RefusedError(value["message"], value["exit_code"])


def _add(record: Record, said: _Progress, progress: Callable[[Record], None]) -> None:
    said.records[record.id] = record
    progress(record)


def _note_ending(
    said: _Progress, ending: str, place: str, levels: Sequence[str], progress: Callable[[Record], None]
) -> None:
    """A FAIL for the check that ended the run, none where the user did, and NOT_RUN for those behind it."""
    if said.target is None:
        raise BackendUnavailableError(f"{said.stage}: it {ending}{place}; check its driver and SDK")
    mode = Mode.SIMULATED if said.target["device"]["simulated"] else Mode.VALIDATED
    at = said.check_id or said.stage
    if said.check_id and ending != _INTERRUPTED:
        said.problems = []
        _add(Record(id=at, outcome=Outcome.FAIL, reason=f"it {ending}{place}", mode=mode), said, progress)
    else:
        said.problems = [f"{at}: the run {ending}" if ending == _INTERRUPTED else f"{at}: it {ending}{place}"]
    for check_id in must_pass(levels):
        if check_id not in said.records:
            _add(
                Record(id=check_id, outcome=Outcome.NOT_RUN, reason=f"the run ended at {at}", mode=mode), said, progress
            )


def _end(worker: subprocess.Popen[bytes], *, ask: bool) -> None:
    """Ends the worker and all that it started; first asks it, by a signal, to write down where it is."""
    if ask and worker.poll() is None:
        worker.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        worker.wait(timeout=_LAST_WORDS_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process that waits in a driver cannot be killed; the report goes out
        worker.wait(timeout=_LAST_WORDS_S)


def _exit_words(worker: subprocess.Popen[bytes]) -> str:
    try:
        code = worker.wait(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        return "it closed its report"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _place(trace: Path) -> str:
    """ " in f (file.py:3), called from test_l1_x.py:20" of the thread that ran the check; empty where unknown."""
    text = trace.read_text(encoding="utf-8", errors="replace") if trace.exists() else ""
    stacks = [list(_FRAME.finditer(part)) for part in re.split(r"\n\n|\nThread ", text)]
    ours = [stack for stack in stacks if any("core_conformance" in frame["file"] for frame in stack)]
    if not ours:
        return ""
    stack = max(ours, key=len)
    called = next((f for f in stack if Path(f["file"]).name.startswith("test_l")), None)
    inner = stack[0]
    place = f" in {inner['name']} ({Path(inner['file']).name}:{inner['line']})"
    if called is None or called is inner:
        return place
    return f"{place}, called from {Path(called['file']).name}:{called['line']}"
