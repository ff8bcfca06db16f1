"""The process in which chat templates run: `python -m core.text.template_worker FD`.

A template is a program, so it runs where it can be killed: the alarm signal ends this process when a template
outlasts its time, and the address space is bounded. Speaks length-prefixed JSON over the given file descriptor.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import jinja2

from core.text.template_environment import TemplateEnvironment, render_owned

__all__ = ["main"]

_MEMORY_BYTES = 2**30
_MESSAGE_CHARS = 500
_RUN = re.compile(rb"\x00+|\x01+|\x02+")


class _Worker:
    def __init__(self) -> None:
        environment = TemplateEnvironment()
        self.compile = lru_cache(maxsize=16)(environment.from_string)

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """The rendered text and its owners as [length, owner] runs, or why there is none."""
        try:
            template = self.compile(job["template"])
            text, mask = render_owned(template, job["owned"], job["values"], job["max_chars"])
        except jinja2.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno}: {error.message}"}
        except MemoryError:
            return {"error": "it needs too much memory"}
        except RecursionError:
            return {"error": "it nests or recurses too deeply"}
        except Exception as error:  # whatever a template can raise is an answer, not a crash
            return {"error": (str(error) or type(error).__name__)[:_MESSAGE_CHARS]}
        return {"text": text, "runs": _run_lengths(mask)}


def _run_lengths(mask: bytes) -> list[list[int]]:
    return [[run.end() - run.start(), mask[run.start()]] for run in _RUN.finditer(mask)]


def main() -> None:
    """Answers jobs until the other end closes."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent's terminal must not end it: only the parent does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    worker = _Worker()
    with Connection(int(sys.argv[1])) as connection:
        connection.send_bytes(b"ready")
        while True:
            try:
                job = json.loads(connection.recv_bytes())
            except EOFError:
                return
            # The default action of the signal ends the process, whatever the template is doing.
            signal.setitimer(signal.ITIMER_REAL, job["time_limit_s"])
            answer = json.dumps(worker.answer(job)).encode()
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(answer)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)
