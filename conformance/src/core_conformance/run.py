"""Runs the suite in this process and says what came of it."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core_conformance.must_pass_lists import mandatory, must_pass, write_must_pass
from core_conformance.plugin import SuitePlugin
from core_conformance.records import Record
from core_conformance.report.document import Report
from core_conformance.report.facts import gather_facts
from core_conformance.served.fixtures import ServedPlugin
from core_conformance.target import Target
from core_conformance.waivers import Waiver, apply_waivers

__all__ = ["SUITE", "Report", "run_suite"]

SUITE = Path(__file__).parent / "suite"
"""Where the checks are."""
_FOREIGN_OPTIONS = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")


def run_suite(
    target: Target,
    levels: Sequence[str],
    *,
    select: Callable[[str], bool] = lambda check_id: True,
    begin: Callable[[str], None] = lambda check_id: None,
    progress: Callable[[Record], None] = lambda record: None,
    waivers: Sequence[Waiver] = (),
    stop_at_first: bool = False,
    order: Callable[[str], Any] = lambda check_id: 0,
    write_lists: bool = False,
    suite: Path = SUITE,
    expected: Sequence[str] | None = None,
) -> Report:
    """Runs the checks of these levels against a backend.

    A check that never returns keeps this from returning; `core_conformance.supervise` runs it in a process of its own.

    Args:
        target: The backend; its shared instance is closed at the end.
        levels: "L0" to "L4".
        select: Whether to run an id.
        begin: Called with each id before it runs, and with "" behind the last.
        progress: Called with each record.
        waivers: Turn FAIL into WAIVED.
        stop_at_first: Stop at the first failure; the ids behind it are missing from the records then.
        order: Sort key of ids; those with an equal key keep the order of the files.
        write_lists: Replace the must-pass lists by what is collected, and run nothing.
        suite: Folder of the checks; for tests of the suite itself.
        expected: Ids in place of the committed lists; for tests of the suite itself.
    """
    begun, start = datetime.datetime.now(datetime.UTC), time.monotonic()
    chosen = (lambda _: False) if write_lists else select
    plugin = SuitePlugin(target, suite=suite, select=chosen, order=order, begin=begin, progress=progress)
    files = [str(path) for level in levels for path in sorted(suite.glob(f"test_{level.lower()}_*.py"))]
    options = ["--disable-plugin-autoload", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:junitxml"]
    options += ["-p", "no:faulthandler"]  # the supervisor has its own, which writes to its trace
    options += ["--import-mode=importlib", f"--rootdir={suite}", "-c", os.devnull, "--strict-markers", "--noconftest"]
    options += ["--maxfail=1"] * stop_at_first
    with _quiet_process():
        pytest.main([*options, *files], plugins=[plugin, ServedPlugin(target)])
    target.close()
    if write_lists:
        write_must_pass(plugin.collected, plugin.mandatory, levels)
    elif not stop_at_first and expected is not None:
        plugin.expect(expected)
    elif not stop_at_first:
        plugin.expect(must_pass(levels), mandatory(levels))
    records = sorted(plugin.records.values(), key=lambda record: record.id)
    facts = gather_facts(
        target.info,
        target.device,
        package=target.package,
        levels=levels,
        waivers=waivers,
        date=begun,
        seconds=time.monotonic() - start,
    )
    return Report(facts, apply_waivers(records, waivers, target.name, target.device.arch), plugin.problems)


@contextmanager
def _quiet_process() -> Iterator[None]:
    """Keeps pytest from writing bytecode beside installed files, from options of the caller's, and torch to one thread.

    The oracle's tensors are tiny: threads that wait for each other made the suite ten times slower on a busy machine. A
    host backend's own threads are its own affair. Options and plugins that the environment names could deselect checks.
    """
    bytecode, threads = sys.dont_write_bytecode, torch.get_num_threads()
    foreign = {name: os.environ.pop(name) for name in _FOREIGN_OPTIONS if name in os.environ}
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        torch.set_num_threads(threads)
        os.environ.update(foreign)
