"""`python -m core_conformance.served.reaper PID`: ends a process group once whoever started it is gone.

Its standard input is a pipe that the suite holds open: its end means that the suite ended, or was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

__all__ = ["main", "watched"]

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""


@contextlib.contextmanager
def watched(pid: int) -> Iterator[None]:
    """While the block runs, the process group of `pid` ends with this process, even where this one is killed."""
    command = [sys.executable, "-P", "-m", "core_conformance.served.reaper", str(pid)]
    # No output of its caller's: whoever reads that to its end would wait for the grace below.
    quiet = subprocess.DEVNULL
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            reaper.communicate(b"done")


def main(pid: int) -> None:
    """Waits for the end of standard input, then ends the process group of `pid`; the line `done` ends the watch."""
    if sys.stdin.read().strip() == "done":
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)
        time.sleep(GRACE_S)
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the suite, which then ends the server
    main(int(sys.argv[1]))
