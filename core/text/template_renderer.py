"""Runs chat templates in worker processes that are killed when a template does not end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from core.errors import TemplateError

__all__ = ["Rendered", "TemplateRenderer", "TemplateStoppedError"]

_START_LIMIT_S = 60.0
_GRACE_S = 2.0
"""Seconds beyond the template's own limit before the parent kills a worker that the alarm should have ended."""


class TemplateStoppedError(TemplateError):
    """A chat template took more time or memory than it may."""


class Rendered:
    """A rendered prompt.

    Args:
        text: The prompt.
        mask: One byte for each character, its owner as in `core.text.owned_text`.
    """

    __slots__ = ("mask", "text")

    def __init__(self, text: str, mask: bytes) -> None:
        assert len(text) == len(mask), "a mask has one byte for each character"
        self.text = text
        self.mask = mask


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self) -> None:
        here, there = Pipe()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "core.text.template_worker", str(there.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(there.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        there.close()
        self.connection: Connection[bytes, bytes] = here
        if self._receive(_START_LIMIT_S) is None:
            self.close()
            raise TemplateError("the process that runs chat templates did not start; see the log of the server")

    def run(self, job: dict[str, Any]) -> dict[str, Any] | None:
        """The worker's answer; None where it died or took too long, and then it is of no more use."""
        try:
            self.connection.send_bytes(json.dumps(job).encode())
        except OSError:
            return None
        answer = self._receive(job["time_limit_s"] + _GRACE_S)
        return None if answer is None else json.loads(answer)

    def _receive(self, limit_s: float) -> bytes | None:
        try:
            return self.connection.recv_bytes() if self.connection.poll(limit_s) else None
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)


def _close_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().close()


class TemplateRenderer:
    """A few worker processes, started when first needed and used again. Safe to call from several threads.

    Args:
        time_limit_s: Seconds that a template may take, compilation included.
        max_chars: Longest prompt.
        max_workers: Templates that may run at once; further callers wait.
    """

    def __init__(self, *, time_limit_s: float = 5.0, max_chars: int = 16 * 2**20, max_workers: int = 2) -> None:
        self.time_limit_s = time_limit_s
        self.max_chars = max_chars
        self._idle: list[_Worker] = []
        self._slots = threading.BoundedSemaphore(max_workers)
        self._finalizer = weakref.finalize(self, _close_all, self._idle)

    def render(self, template: str, owned: Mapping[str, str], values: Mapping[str, Any]) -> Rendered:
        """The prompt that `template` makes.

        Args:
            template: Jinja source.
            owned: Variables that count as the template's own: the special tokens.
            values: Variables from the request, plain JSON values.

        Raises:
            TemplateError: the template is wrong or refused the conversation, or a value is no plain JSON.
            TemplateStoppedError: it took too much time or memory.
        """
        job = {
            "template": template,
            "owned": dict(owned),
            "values": _plain(values),
            "max_chars": self.max_chars,
            "time_limit_s": self.time_limit_s,
        }
        with self._slots:
            answer = self._run(job)
        if "error" in answer:
            raise TemplateError(f"the chat template failed: {answer['error']}; change the messages or the template")
        return Rendered(answer["text"], _mask(answer["runs"]))

    def close(self) -> None:
        """Ends the workers. A later call starts new ones."""
        _close_all(self._idle)

    def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        worker = self._take_idle() or _Worker()
        try:
            answer = worker.run(job)
        except BaseException:
            worker.close()
            raise
        if answer is None:
            worker.close()
            raise TemplateStoppedError(
                f"the chat template was stopped: it ran for more than {self.time_limit_s:g} s or used too much memory; "
                "shorten the messages or correct the template"
            )
        self._idle.append(worker)
        return answer

    def _take_idle(self) -> _Worker | None:
        """A live idle worker, or None; one that died meanwhile is thrown away."""
        while True:
            try:
                worker = self._idle.pop()
            except IndexError:
                return None
            if worker.process.poll() is None:
                return worker
            worker.close()


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(
            f"the conversation is not plain JSON: {error}; send strings, numbers, lists, objects"
        ) from None
    return dict(values)


def _mask(runs: list[list[int]]) -> bytes:
    return b"".join(bytes([owner]) * length for length, owner in runs)
