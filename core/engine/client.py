"""One engine process as its parent sees it: started, spoken to, watched, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import zmq
import zmq.asyncio

from core.config import EngineConfig
from core.engine import protocol
from core.engine.child import start_process
from core.engine.protocol import Dying, Failed, Launch, Ready, Shutdown
from core.errors import ConfigError, CoreError, EngineDeadError

__all__ = ["EngineClient"]

MAX_IPC_PATH = 100
"""Bytes of a socket's path that every system takes."""
LAST_WORDS_S = 0.2
"""How long the messages of a process that has ended are looked for."""


class EngineClient:
    """A running engine process. Belongs to the event loop that launched it.

    The process is in a session of its own, so that a Ctrl-C in the terminal reaches the parent alone; the parent
    holds the process's standard input open, and the process ends when that closes.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: str, sockets: _Sockets) -> None:
        self._process = process
        self._folder = folder
        self._sockets = sockets
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Done with the exit code (negative: a signal) as soon as the process has ended, however it did."""
        self._reason: str | None = None
        threading.Thread(target=self._wait, args=(asyncio.get_running_loop(),), daemon=True).start()

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        *,
        runner_factory: str | None = None,
        env: Mapping[str, str] | None = None,
        early: subprocess.Popen[bytes] | None = None,
        ready_timeout_s: float = 1800.0,
    ) -> tuple[EngineClient, Ready]:
        """A process whose engine takes requests, and what it said when it did.

        Args:
            config: What to serve.
            runner_factory: As for `build_engine`.
            env: Set in the process before its first import, over this process's environment.
            early: A process of `start_process` to take, this one's from here on; None starts one.
            ready_timeout_s: Seconds that loading may take.

        Raises:
            CoreError: the very error that the engine could not be built for.
            EngineDeadError: the process ended, or was not ready in time, without a word.
        """
        folder = tempfile.mkdtemp(prefix="core-engine-")
        try:
            sockets = _Sockets(folder)
            launch = Launch(config=config, inbox=sockets.inbox, outbox=sockets.outbox, runner_factory=runner_factory)
            process = early or start_process(env or {}, import_ahead=runner_factory is None)
            _send_launch(process, launch)
            client = cls(process, folder, sockets)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            return client, await client._ready(ready_timeout_s)
        except BaseException:
            await client.stop(0.0)
            raise

    def send(self, message: protocol.ToEngine) -> None:
        """Queues the message for the process; never blocks.

        Raises:
            EngineDeadError: the process has ended.
        """
        if self.exited.done():
            raise EngineDeadError("the engine process has ended; send the request again")
        with contextlib.suppress(zmq.Again):
            self._sockets.to_engine.send(protocol.encode(message), zmq.NOBLOCK)

    async def receive(self) -> protocol.FromEngine:
        """The next message of the process; waits for it, also after the process has ended."""
        message = protocol.decode_from_engine(await self._sockets.from_engine.recv())
        if isinstance(message, Dying):
            self._reason = message.reason
        return message

    async def last_words(self) -> str:
        """Why the process ended: its own words, where it had the time for some, else its exit code."""
        code = await self.exited
        if code < 0:
            return self._reason or _describe_exit(code)  # what a signal ended had no time for words
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                while self._reason is None:
                    await self.receive()
        return self._reason or _describe_exit(code)

    async def stop(self, timeout_s: float) -> int:
        """Ends the process: asks, waits for `timeout_s`, then kills. The exit code. A second call has no effect."""
        if not self.exited.done() and timeout_s > 0:
            self.send(Shutdown())
            await asyncio.wait([self.exited], timeout=timeout_s)
        if not self.exited.done():
            self._process.kill()
        code = await self.exited
        self._sockets.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return code

    async def _ready(self, timeout_s: float) -> Ready:
        first = asyncio.ensure_future(self.receive())
        try:
            ends: list[asyncio.Future[Any]] = [first, self.exited]
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                await asyncio.wait([first], timeout=LAST_WORDS_S)
            if first.done():
                return _as_ready(first.result())
        finally:
            first.cancel()
        if self.exited.done():
            raise EngineDeadError(f"the engine could not start: {_describe_exit(self.exited.result())}")
        raise EngineDeadError(f"the engine was not ready after {timeout_s:g} s; see its log, or allow more time")

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Thread: waits for the process's end and tells the loop, where that still runs."""
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)


class _Sockets:
    """The parent's two sockets, bound in a folder that only this user can enter."""

    def __init__(self, folder: str) -> None:
        self.inbox, self.outbox = (f"ipc://{os.path.join(folder, name)}" for name in ("in", "out"))
        if len(os.fsencode(self.outbox)) > MAX_IPC_PATH:
            raise ConfigError(
                f"the temporary folder {folder!r} has too long a path for sockets; set TMPDIR to a shorter"
            )
        self._context = zmq.asyncio.Context()
        self.to_engine = zmq.Socket(zmq.Context.shadow(self._context), zmq.PUSH)
        self.from_engine = self._context.socket(zmq.PULL)
        for socket, address in ((self.to_engine, self.inbox), (self.from_engine, self.outbox)):
            socket.set_hwm(0)
            socket.bind(address)

    def close(self) -> None:
        """Drops what was not sent. A second call has no effect."""
        self.to_engine.close(linger=0)
        self.from_engine.close(linger=0)
        self._context.destroy(linger=0)


def _send_launch(process: subprocess.Popen[bytes], launch: Launch) -> None:
    data = protocol.encode(launch)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(len(data).to_bytes(8, "big") + data)
        process.stdin.flush()


def _as_ready(message: protocol.FromEngine) -> Ready:
    match message:
        case Ready():
            return message
        case Failed(error):
            raise error.error()
    raise CoreError(f"the engine process began with {type(message).__name__}; parent and child are of two versions")


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with exit code {code}; see its log"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; out of memory?" if -code == signal.SIGKILL else "; see its log"
    return f"the engine process was ended by signal {name}{hint}"
