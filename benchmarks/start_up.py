"""Seconds from the command to a server that answers, of one environment or of several in turn.

    python benchmarks/start_up.py MODEL ... [--rounds 5] [--core PATH ...] [--serve-args "..."]

`--core` names the programs to start, as `before/.venv/bin/core after/.venv/bin/core`; without it the one beside this
Python. Prints median, least and most of each, and the CPU seconds of all its processes up to then.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
from servers import ServerCommand, running

__all__ = ["main"]


def measure(server: ServerCommand) -> tuple[float, float]:
    """Seconds to ready, and CPU seconds of the server and the processes below it."""
    with running(server) as found:
        top = psutil.Process(found.pid)
        times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
        return found.ready_s, sum(each.user + each.system for each in times)


def main(arguments: Sequence[str]) -> None:
    """Measures and prints a line for each model and program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", nargs="+", default=[str(Path(sys.executable).parent / "core")])
    parser.add_argument("--serve-args", default="", help="more flags of core serve")
    asked = parser.parse_args(arguments)
    for model in asked.models:
        servers = [
            ServerCommand(name=core, command=[core, "serve", model, *shlex.split(asked.serve_args)])
            for core in asked.core
        ]
        found: dict[str, list[tuple[float, float]]] = {server.name: [] for server in servers}
        for index in range(asked.rounds):
            for server in servers if index % 2 == 0 else servers[::-1]:
                found[server.name].append(measure(server))
        for name, runs in found.items():
            ready, cpu = zip(*runs, strict=True)
            print(
                f"{Path(model).name:20} {name}: ready after {statistics.median(ready):.2f} s (median; "
                f"{min(ready):.2f} to {max(ready):.2f}), CPU {statistics.median(cpu):.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
