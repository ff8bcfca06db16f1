"""Runs the suite in this process and says what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from core.spec import CONTRACT_VERSION
from core_conformance.must_pass_lists import must_pass, write_must_pass
from core_conformance.plugin import SuitePlugin
from core_conformance.records import Outcome, Record, level_of
from core_conformance.target import Target
from core_conformance.waivers import Waiver, apply_waivers

__all__ = ["SUITE", "Report", "list_ids", "run_suite", "suite_hash"]

SUITE = Path(__file__).parent / "suite"
"""Where the checks are."""


@dataclass
class Report:
    """What a run says of a backend.

    Args:
        target: The backend.
        levels: Levels asked for.
        records: One for each id.
        problems: What kept the suite from being run as it must be.
    """

    target: Target
    levels: tuple[str, ...]
    records: list[Record]
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something ran, and everything that ran ended acceptably."""
        ran = [record for record in self.records if record.outcome is not Outcome.NOT_RUN]
        return bool(ran) and not self.problems and all(record.outcome.acceptable for record in ran)

    @property
    def failures(self) -> list[Record]:
        """Records that are not acceptable."""
        skipped = Outcome.NOT_RUN
        return [record for record in self.records if not record.outcome.acceptable and record.outcome is not skipped]

    def complete(self, level: str) -> bool:
        """Whether every id of the level ended acceptably; ids that were not run make it incomplete."""
        mine = [record for record in self.records if level_of(record.id) == level]
        return bool(mine) and not self.problems and all(record.outcome.acceptable for record in mine)

    def summary(self) -> str:
        """One line a level, then each problem and failure with its reason."""
        lines = [self._level_line(level) for level in self.levels]
        own = [record for record in self.records if record.id.startswith(f"{self.target.name}/")]
        if own:
            passed = sum(record.outcome is Outcome.PASS for record in own)
            lines.append(f"{self.target.name} further cases of its package: {passed} of {len(own)} PASS")
        lines += [f"ERROR   {problem}" for problem in self.problems]
        lines += [f"{record.outcome:<7} {record.id}: {record.reason}" for record in self.failures]
        return "\n".join(lines)

    def _level_line(self, level: str) -> str:
        mine = [record for record in self.records if level_of(record.id) == level]
        counts = Counter(record.outcome for record in mine)
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
        worst = max(((r.ratio, r.id) for r in mine if r.ratio is not None), default=None)
        margin = "" if worst is None else f"; worst err/bound {worst[0]:.2f} ({worst[1]})"
        seconds = sum(record.seconds for record in mine)
        state = "complete" if self.complete(level) else "NOT complete"
        where = f"{self.target.name} {level} ({self.target.mode})"
        return f"{where}: {state}: {told or 'no check'}{margin}; {seconds:.1f} s"

    def to_lines(self) -> Iterator[str]:
        """The report: a line on the run, then one line a check."""
        yield json.dumps({"record": "run", **_environment(self.target), "levels": self.levels}, sort_keys=True)
        for record in self.records:
            yield record.to_json()


def run_suite(
    target: Target,
    levels: Sequence[str],
    *,
    select: Callable[[str], bool] = lambda check_id: True,
    progress: Callable[[Record], None] = lambda record: None,
    waivers: Sequence[Waiver] = (),
    stop_at_first: bool = False,
    order: Callable[[str], Any] = lambda check_id: 0,
    write_lists: bool = False,
    suite: Path = SUITE,
    expected: Sequence[str] | None = None,
) -> Report:
    """Runs the checks of these levels against a backend.

    Args:
        target: The backend; its shared instance is closed at the end.
        levels: "L0" to "L3".
        select: Whether to run an id.
        progress: Called with each record.
        waivers: Turn FAIL into WAIVED.
        stop_at_first: Stop at the first failure; the ids behind it are missing from the records then.
        order: Sort key of ids; those with an equal key keep the order of the files.
        write_lists: Replace the must-pass lists by what is collected, and run nothing.
        suite: Folder of the checks; for tests of the suite itself.
        expected: Ids in place of the committed lists; for tests of the suite itself.
    """
    plugin = SuitePlugin(target, select=(lambda _: False) if write_lists else select, order=order, progress=progress)
    files = [str(path) for level in levels for path in sorted(suite.glob(f"test_{level.lower()}_*.py"))]
    options = ["--disable-plugin-autoload", "-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:junitxml"]
    options += ["--import-mode=importlib", f"--rootdir={suite}", "-c", os.devnull, "--strict-markers"]
    options += ["--maxfail=1"] * stop_at_first
    with _quiet_process():
        pytest.main([*options, *files], plugins=[plugin])
    target.close()
    if write_lists:
        write_must_pass(plugin.collected, levels)
    elif not stop_at_first:
        plugin.expect(must_pass(levels) if expected is None else expected)
    records = apply_waivers(sorted(plugin.records.values(), key=lambda record: record.id), waivers, target)
    return Report(target=target, levels=tuple(levels), records=records, problems=plugin.problems)


def list_ids(levels: Sequence[str]) -> list[str]:
    """Committed ids of these levels."""
    return must_pass(levels)


def suite_hash() -> str:
    """First 16 hex digits of the SHA-256 over every file of the suite and its lists."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".txt")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _quiet_process() -> Iterator[None]:
    """Keeps pytest from writing bytecode beside installed files, and torch to one thread.

    The oracle's tensors are tiny: threads that wait for each other made the suite ten times slower on a busy machine. A
    host backend's own threads are its own affair.
    """
    bytecode, threads = sys.dont_write_bytecode, torch.get_num_threads()
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        torch.set_num_threads(threads)


def _environment(target: Target) -> dict[str, Any]:
    return {
        "backend": target.name,
        "package": target.package,
        "device": dataclasses.asdict(target.device),
        "mode": target.mode,
        "suite": _version("core-conformance"),
        "suite_hash": suite_hash(),
        "core": _version("core-inference"),
        "contract": ".".join(map(str, CONTRACT_VERSION)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
