"""Signs of life of an engine process: the thread that sends them, and the books of who waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import zmq

from core.engine import protocol
from core.engine.protocol import Beat

__all__ = ["BEAT_S", "Pulse", "beating"]

BEAT_S = 2.0
"""Seconds between two beats."""
STEP_LIMIT_S = 600.0
"""A step of this length will hardly end; no model that is of use takes so long for one."""


class Pulse:
    """How long a process has been silent, in seconds in which the one who listens was awake itself.

    Args:
        limit_s: Silence from which on the process counts as unresponsive.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._step_s = 0.0
        self.silent_s = 0.0

    def news(self, step_s: float = 0.0) -> None:
        """The process was heard; its step at hand has taken `step_s`."""
        self.silent_s, self._step_s = 0.0, step_s

    def wait(self, seconds: float) -> None:
        """So much more time went by without a word."""
        self.silent_s += seconds

    @property
    def problem(self) -> str | None:
        """What is wrong with the process, or None."""
        if self.silent_s >= self._limit_s:
            return f"the engine process has given no sign of life for {self.silent_s:.0f} s"
        if self._step_s >= STEP_LIMIT_S:
            return f"a step of the engine has not ended for {self._step_s:.0f} s"
        return None


@contextlib.contextmanager
def beating(context: zmq.Context[zmq.Socket[bytes]], address: str, step_s: Callable[[], float]) -> Iterator[None]:
    """Sends a Beat to `address` every `BEAT_S` while the block runs, from a thread with a socket of its own.

    Args:
        context: Still open when the block ends.
        address: Where the process sends its other messages too.
        step_s: Seconds of the step at hand; called in the thread.
    """
    ended = threading.Event()

    def beat() -> None:
        with context.socket(zmq.PUSH) as socket:
            socket.linger = 0
            socket.connect(address)
            while not ended.wait(BEAT_S):
                with contextlib.suppress(zmq.Again):  # a parent that does not read needs no further beat
                    socket.send(protocol.encode(Beat(step_s())), zmq.NOBLOCK)

    thread = threading.Thread(target=beat, name="engine-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
