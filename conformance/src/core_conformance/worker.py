"""The process in which checks run under supervision: it says on a pipe what it begins and what came of it.

A line is one JSON object with one key: `stage` (what it begins outside of checks), `target` (the backend and its
device), `begin` (an id), `record`, `problems` (the end), `refusal` (an error that is the user's to mend).
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from core.errors import CoreError

__all__ = ["main"]


class Journal:
    """Writes lines to the supervisor, each at once.

    Args:
        out: The pipe.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, kind: str, value: Any) -> None:
        """One line."""
        self._out.write(json.dumps({kind: value}) + "\n")
        self._out.flush()


def main(args: Sequence[str]) -> None:
    """Runs the order in `args[0]`: pipe, trace file, backend, levels and selection, as `supervise` wrote it."""
    order = json.loads(args[0])
    _no_core_dump()
    with os.fdopen(order["pipe"], "w", encoding="utf-8") as pipe, open(order["trace"], "w", encoding="utf-8") as trace:
        # Also for SIGABRT, which the supervisor sends to learn where a check hangs, be it in C with the GIL held.
        faulthandler.enable(trace)
        journal = Journal(pipe)
        try:
            _run(order, journal)
        except CoreError as error:
            journal.write("refusal", {"message": str(error), "exit_code": error.exit_code})
        faulthandler.disable()


def _run(order: dict[str, Any], journal: Journal) -> None:
    journal.write("stage", f"loading backend {order['backend']!r} and probing its device")
    from core.plugins import list_conformance_cases
    from core_conformance.commands.selection import selector
    from core_conformance.records import Record
    from core_conformance.run import run_suite
    from core_conformance.served.options import ServedOptions
    from core_conformance.target import load_target
    from core_conformance.vendor_cases import run_vendor_cases

    target, chosen, skip = load_target(order["backend"]), selector(order["selection"]), frozenset(order["skip"])
    device = dataclasses.asdict(target.device)
    journal.write("target", {"info": dataclasses.asdict(target.info), "device": device, "package": target.package})

    def select(check_id: str) -> bool:
        return check_id not in skip and chosen(check_id)

    def note(record: Record) -> None:
        journal.write("record", record.to_dict())

    def begin(check_id: str) -> None:
        journal.write(*(("begin", check_id) if check_id else ("stage", "closing the device")))

    served = next((Path(folder) for folder, _ in order["checkpoints"]), None)
    target.served = ServedOptions(model=served, soak_seconds=order["soak_seconds"])
    journal.write("stage", "collecting the checks")
    report = run_suite(target, order["levels"], select=select, begin=begin, progress=note)
    for folder, dtype in order["checkpoints"]:
        from core_conformance.engines.checkpoint import Checkpoint, run_checkpoint

        checkpoint = Checkpoint(folder=Path(folder), dtype=dtype)
        for record in run_checkpoint(target, checkpoint, order["levels"], select=select, begin=begin):
            note(record)
    for case in list_conformance_cases(target.name):
        journal.write("begin", case.id)
        for record in run_vendor_cases(target, [case], select=select):
            note(record)
    journal.write("stage", "closing the device")
    target.close()
    journal.write("problems", report.problems)


def _no_core_dump() -> None:
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
