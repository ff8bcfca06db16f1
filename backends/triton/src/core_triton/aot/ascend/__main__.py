"""`python -m core_triton.aot.ascend`: lowers, runs what can be run, and writes the table."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TextIO

from core.errors import CoreError
from core_triton.aot.ascend import host, lowering, numbers
from core_triton.aot.ascend.table import render
from core_triton.aot.pool import run_pooled

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core_triton.aot.ascend",
        description="Lowers every kernel for Ascend as far as open tools go, and runs three of them on the host.",
        epilog="Exit code 0: what must hold does. 1: it does not. 2: this environment cannot do it.",
    )
    parser.add_argument(
        "-k", dest="pattern", default="", metavar="TEXT", help="only builds whose 'op [label]' holds TEXT"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument(
        "--cache", type=Path, default=Path("build/compiled-ascend"), metavar="DIR", help="earlier answers"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table; needs every build")
    parser.add_argument("-v", action="store_true", dest="verbose", help="print each build as it ends")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the exit code."""
    arguments = _parser().parse_args(argv)
    wrong = lowering.missing() or host.missing()
    if not wrong and arguments.write and arguments.pattern:
        wrong = "--write makes the table of all builds; leave out -k"
    if wrong:
        _say(wrong, sys.stderr)
        return 2
    try:
        return _run(arguments)
    except CoreError as error:
        _say(str(error), sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    begin = time.perf_counter()
    checked = numbers.check()
    for one in checked:
        verdict = "ok" if one.ok else "WRONG"
        _say(f"{verdict}: {one.case} {one.bug or 'as it is'}: {one.refused or f'{one.error:.2e} of {one.bound:.0e}'}")
    work = [job for job in lowering.lowerings() if arguments.pattern in f"{job.op} [{job.label}]"]
    function = partial(lowering.lower, cache_folder=arguments.cache)
    told = _print if arguments.verbose else lambda _: None
    results = run_pooled(work, function, processes=arguments.jobs, died=lowering.died, told=told)
    if arguments.write:
        arguments.write.write_text(render(results, checked), encoding="utf-8")
    lost = _must_lower(results)
    for found in lost:
        _say(f"must lower and does not: {found.job.op} [{found.job.label}] for {found.job.chip}: {found.reason}")
    whole = sum(found.stage == "hivm" for found in results)
    bad = sum(not one.ok for one in checked)
    spent = time.perf_counter() - begin
    _say(f"COMPILED to HIVM: {whole} of {len(results)}; run on the host: {len(checked) - bad} of {len(checked)} right")
    _say(f"in {spent:.0f} s; no NPU code is made, and none runs")
    return 1 if lost or bad else 0


def _must_lower(results: Sequence[lowering.Lowered]) -> list[lowering.Lowered]:
    """The kernels whose numbers are compared have to go all the way."""
    cases = {(case.op, case.label) for case in numbers.CASES}
    return [found for found in results if (found.job.op, found.job.label) in cases and found.stage != "hivm"]


def _print(found: lowering.Lowered) -> None:
    _say(f"{found.job.chip} {found.job.op} [{found.job.label}]: {found.stage} {found.reason}")


def _say(line: str, stream: TextIO | None = None) -> None:
    to = stream or sys.stdout
    to.write(f"{line}\n")
    to.flush()


if __name__ == "__main__":
    sys.exit(main())
