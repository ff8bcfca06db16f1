"""`python -m core_triton.aot`: compiles, judges, and writes the table."""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TextIO

from core.errors import CoreError
from core_triton.aot.compiling import NOT_COMPILED, Compiled, Job, compile_job, crashed, jobs, refusal
from core_triton.aot.gates import exemptions, judge
from core_triton.aot.pool import run_pooled
from core_triton.aot.table import render
from core_triton.target import TARGETS

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core_triton.aot",
        description="Compiles every kernel for every target, without any of them, and judges the machine code.",
        epilog="Exit code 0: every gate holds. 1: one does not. 2: nothing could be compiled.",
    )
    parser.add_argument("--target", action="append", metavar="ARCH", help="only this target; may be repeated")
    parser.add_argument(
        "-k", dest="patterns", action="append", metavar="TEXT", help="only builds whose 'op [label]' holds TEXT"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--cache", type=Path, default=Path("build/compiled"), metavar="DIR", help="earlier answers")
    parser.add_argument("--no-cache", action="store_true", help="compile everything anew")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table; needs every build of every target")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--known", action="store_true", help="compile nothing: earlier answers, the rest is UNTESTED")
    parser.add_argument("--list", action="store_true", help="only print what would be compiled")
    parser.add_argument("-v", action="store_true", dest="verbose", help="print each build as it ends")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the command; the exit code."""
    arguments = _parser().parse_args(argv)
    unknown = [arch for arch in arguments.target or [] if arch not in TARGETS]
    wrong = refusal()
    if unknown:
        wrong = f"{', '.join(unknown)}: no such target; give of {', '.join(TARGETS)}"
    if wrong:
        _say(wrong, sys.stderr)
        return 2
    try:
        return _run(arguments)
    except CoreError as error:
        _say(str(error), sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    everything = list(jobs(arguments.target))
    work = [job for job in everything if _matches(job, arguments.patterns)]
    complete = not arguments.patterns and not arguments.target
    if not work:
        raise CoreError(f"no build matches {arguments.patterns}; --list shows all")
    if arguments.list:
        for job in work:
            _say(f"{job.arch:8} {job.op} [{job.label}]")
        return 0
    if arguments.jobs < 1:
        raise CoreError(f"--jobs must be at least 1, got {arguments.jobs}")
    for place in (arguments.json, arguments.write):
        if place is not None and not place.parent.is_dir():
            raise CoreError(f"there is no folder {str(place.parent)!r} to write {place.name} to; make it first")
    if arguments.write and not complete:
        raise CoreError("--write makes the table of all builds; leave out -k and --target")
    begin = time.perf_counter()
    cache = None if arguments.no_cache else arguments.cache
    told = _print if arguments.verbose else lambda _: None
    if arguments.known:
        results = [compile_job(job, cache, known_only=True) for job in work]
    else:
        function = partial(compile_job, answers=cache)
        results = run_pooled(work, function, processes=arguments.jobs, died=crashed, told=told)
    findings, let_off, idle = judge(results, exemptions(), complete=complete and not arguments.known)
    for finding in findings:
        _say(finding.line())
    for exemption in idle:
        entry = f"{exemption.op} [{exemption.label}] {exemption.gate}"
        _say(f"exceptions.toml: the entry {entry} lets nothing off: remove it")
    if arguments.json:
        arguments.json.write_text(json.dumps([found.to_dict() for found in results], indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        import triton

        text = render(results, let_off, triton_version=triton.__version__, findings=len(findings))
        arguments.write.write_text(text, encoding="utf-8")
    spent = time.perf_counter() - begin
    compiled = sum(found.error != NOT_COMPILED for found in results)
    figures = f"{compiled} of {len(results)} builds, {len(findings)} findings, {len(let_off)} let off"
    _say(f"COMPILED: {figures}, in {spent:.0f} s")
    return 1 if findings or idle else 0


def _say(line: str, stream: TextIO | None = None) -> None:
    to = stream or sys.stdout
    to.write(f"{line}\n")
    to.flush()


def _matches(job: Job, patterns: list[str] | None) -> bool:
    text = f"{job.op} [{job.label}]"
    return not patterns or any(fnmatchcase(text, word) if "*" in word else word in text for word in patterns)


def _print(found: Compiled) -> None:
    job, end = found.job, found.error or str(found.resources)
    _say(f"{job.arch:8} {job.op} [{job.label}] {found.seconds:.1f} s: {end}")


if __name__ == "__main__":
    sys.exit(main())
