"""The engine process: builds an engine, says so, and runs it until told to stop or left alone.

It is a plain child (`python -c ...`), so that a backend's environment is set before anything is imported and nothing
of the parent's `__main__` runs again. Its standard input carries the launch message and then stays open: its end
means that the parent is gone, however it went.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import zmq

from core.engine import protocol
from core.engine.build import build_engine
from core.engine.child import IMPORT_AHEAD
from core.engine.engine import Engine
from core.engine.heap import keep_heap, release_heap
from core.engine.protocol import Abort, Add, Call, Dying, Failed, Launch, Outputs, Ready, Rejected, Reply, Shutdown
from core.engine.pulse import beating
from core.errors import CoreError, EngineDeadError
from core.outputs import EngineOutput

__all__ = ["EngineLoop", "main"]

logger = logging.getLogger("core.engine")

STALL_POLL_MS = 5
"""How long a loop sleeps that has requests but can run none of them; only a message or memory can change that."""
FLUSH_MS = 2000
"""How long a dying process waits for its last messages to be taken."""


class EngineLoop:
    """Feeds an engine from one socket and sends what it gives to another.

    Messages are handled between steps. Without work the loop blocks on the socket; with work it only looks.
    """

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._running = True
        self._step_began: float | None = None
        self._stats_sent = engine.stats()
        self._calls: dict[str, Callable[[], None]] = {
            "reset_prefix_cache": engine.reset_prefix_cache,
            "check_integrity": engine.check_integrity,
        }

    def run(self) -> None:
        """Says Ready and serves; returns after a Shutdown message.

        Raises:
            EngineDeadError: the runner cannot run any more.
        """
        self._send(Ready(self._engine.facts, self._stats_sent))
        while self._running:
            self._receive()
            self._report(self._step() if self._engine.has_work() else [])

    def step_s(self) -> float:
        """Seconds that the step at hand has taken up to now; 0 without one. Any thread may ask."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def _step(self) -> list[EngineOutput]:
        self._step_began = time.monotonic()
        try:
            return self._engine.step()
        finally:
            self._step_began = None

    def _receive(self) -> None:
        """Handles every message that is there; waits for one where there is nothing else to do."""
        timeout_ms = self._patience_ms()
        while self._running and self._inbox.poll(timeout_ms):
            self._handle(protocol.decode_to_engine(self._inbox.recv()))
            timeout_ms = 0

    def _patience_ms(self) -> int | None:
        if not self._engine.has_work():
            return None
        return STALL_POLL_MS if self._engine.stalled else 0

    def _handle(self, message: protocol.ToEngine) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort(request_ids):
                self._engine.abort(request_ids)
            case Call():
                self._send(self._call(message))
            case Shutdown():
                self._running = False

    def _add(self, message: Add) -> None:
        try:
            self._engine.add_requests(message.requests)
        except CoreError as error:
            self._send(Rejected([request.request_id for request in message.requests], protocol.WireError.of(error)))

    def _call(self, call: Call) -> Reply:
        try:
            self._calls[call.method]()
            return Reply(call.call_id)
        except Exception as error:
            return Reply(call.call_id, error=protocol.WireError.of(error))

    def _report(self, outputs: list[EngineOutput]) -> None:
        """Sends the news of a step in one message, and the gauges where they changed."""
        stats = self._engine.stats()
        if outputs or stats != self._stats_sent:
            self._send(Outputs(outputs, stats))
            self._stats_sent = stats

    def _send(self, message: protocol.FromEngine) -> None:
        self._outbox.send(protocol.encode(message))


def main() -> NoReturn:
    """Entry of the child process: reads a Launch message from standard input and serves it."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lifeline = os.dup(0)
    if IMPORT_AHEAD in sys.argv:
        _import_ahead()
    signal.signal(signal.SIGTERM, _end)  # no earlier: an import may take what it raises for a failure, and go on
    keep_heap()
    launch = _read_launch(lifeline)
    _detach_stdin()
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    sys.exit(_serve(launch))


def _serve(launch: Launch) -> int:
    """Runs one engine to its end; the exit code."""
    with zmq.Context() as context:
        inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        for socket, address in ((inbox, launch.inbox), (outbox, launch.outbox)):
            socket.set_hwm(0)
            socket.linger = FLUSH_MS
            socket.connect(address)
        with inbox, outbox:
            return _build_and_run(launch, context, inbox, outbox)


def _build_and_run(
    launch: Launch, context: zmq.Context[zmq.Socket[bytes]], inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]
) -> int:
    try:
        engine = build_engine(launch.config, runner_factory=launch.runner_factory)
        release_heap()
        gc.collect()  # of what building has made: the rest is out of reach
        keep_heap()
    except CoreError as error:
        outbox.send(protocol.encode(Failed(protocol.WireError.of(error), error.exit_code)))
        return error.exit_code
    except Exception as error:
        logger.exception("the engine could not be built")
        outbox.send(protocol.encode(Failed(protocol.WireError.of(error), 1)))
        return 1
    try:
        loop = EngineLoop(engine, inbox, outbox)
        with beating(context, launch.outbox, loop.step_s):
            loop.run()
        return 0
    except EngineDeadError as error:
        logger.error("the engine ends: %s", error)
        outbox.send(protocol.encode(Dying(str(error))))
        return error.exit_code
    except Exception as error:
        logger.exception("the engine ends after an error of its own")
        outbox.send(protocol.encode(Dying(f"internal error, {type(error).__name__}: {error}")))
        return 1
    finally:
        engine.close()


def _import_ahead() -> None:
    """Imports what a runner of a device takes, while the parent still prepares the launch message."""
    with contextlib.suppress(Exception):  # building the engine runs into it again, and says it to the parent
        importlib.import_module("core.engine.device_runner")


def _read_launch(fd: int) -> Launch:
    """The launch message: its length in 8 bytes, big-endian, then msgpack."""
    with os.fdopen(os.dup(fd), "rb", buffering=0) as stream:
        size = int.from_bytes(_read_exactly(stream.read, 8), "big")
        return protocol.decode_launch(_read_exactly(stream.read, size))


def _read_exactly(read: Callable[[int], bytes | None], size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = read(size - len(data))
        if not piece and IMPORT_AHEAD in sys.argv:
            raise SystemExit(1)  # the parent has ended before it had anything to serve
        if not piece:
            raise SystemExit("the engine process is started by core itself and not by hand; run `core serve`")
        data += piece
    return data


def _detach_stdin() -> None:
    """Leaves /dev/null as standard input, so that nothing that this process starts holds the lifeline."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _die_with_parent(lifeline: int) -> None:
    while os.read(lifeline, 1):
        pass
    os._exit(1)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
