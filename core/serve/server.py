"""One process that serves: port first, then the model, then requests, and a quiet end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from core.errors import ConfigError, CoreError
from core.serve.app import build_app
from core.serve.interface import ServedEngine
from core.serve.prompts import ChatRenderer
from core.serve.settings import ServeSettings
from core.serve.state import ServerState

__all__ = ["bind", "serve"]

log = logging.getLogger("core.serve")

CLOSE_TIMEOUT_S = 2
"""Seconds that idle connections get to close at the end."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop the other server or give another --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; check --host and --port") from None
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` has its own, which drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stopper:
    """Turns the first SIGTERM or SIGINT into an event and the second into an immediate end."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.forced = asyncio.Event()

    def install(self) -> None:
        """Takes the signals over, where this is the main thread."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                loop.add_signal_handler(sig, self.stop)

    def stop(self) -> None:
        """Asks for the end; a second call forces it."""
        (self.forced if self.asked.is_set() else self.asked).set()


async def serve(
    settings: ServeSettings,
    model: str,
    start_engine: Callable[[], Awaitable[ServedEngine]],
    *,
    make_renderer: Callable[[ServedEngine], ChatRenderer],
    on_ready: Callable[[ServedEngine, str, float], None],
    scheduling_policy: str = "fcfs",
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains and ends the engine.

    The port is open before the model is loaded; until it is, /health and requests get 503 (`loading`).

    Args:
        settings: The operator's.
        model: The model as the operator named it.
        start_engine: Loads the model.
        make_renderer: Its chat template, once it is loaded.
        on_ready: Called once with engine, URL and seconds since the start.
        scheduling_policy: The engine's; without "priority" a request's priority is refused.
        stop: Ends the server like a signal; for callers that are not the main thread.

    Raises:
        CoreError: the port is taken, or the engine could not be started.
    """
    begin = time.monotonic()
    sock = bind(settings.host, settings.port)
    stopper = _Stopper()
    stopper.install()
    if stop is not None:
        stopper.asked = stop
    state = ServerState(settings, model)
    state.scheduling_policy = scheduling_policy
    server = _make_server(state)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        engine = await _unless(stopper.asked, start_engine())
        if engine is not None:
            try:
                state.attach(engine, make_renderer(engine))
                on_ready(engine, _url(sock), time.monotonic() - begin)
                await _first_of(serving, stopper.asked)
                await _drain(state, engine, settings.shutdown_timeout, stopper)
            finally:
                await engine.shutdown()
                state.renderer.close()
    finally:
        server.should_exit = True
        await serving


def _make_server(state: ServerState) -> _Server:
    config = uvicorn.Config(
        build_app(state),
        lifespan="off",
        log_config=None,
        access_log=state.settings.log_requests,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        server_header=False,
        ws="none",
    )
    return _Server(config)


async def _unless(event: asyncio.Event, work: Awaitable[ServedEngine]) -> ServedEngine | None:
    """The result of `work`, or None where the event came first; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    await _first_of(task, event)
    if task.done():
        return task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, CoreError):
        await task
    return None


async def _first_of(task: asyncio.Future[Any], event: asyncio.Event) -> None:
    waiter = asyncio.ensure_future(event.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()


async def _drain(state: ServerState, engine: ServedEngine, timeout: float, stopper: _Stopper) -> None:
    """Takes no new requests and lets running ones finish."""
    state.draining = True
    if state.num_requests:
        log.info("shutting down: %d requests get %g s to finish", state.num_requests, timeout)
    drained = asyncio.ensure_future(_idle(state, engine, timeout))
    await _first_of(drained, stopper.forced)
    drained.cancel()


async def _idle(state: ServerState, engine: ServedEngine, timeout: float) -> None:
    """Returns when every answer is sent; requests that are not finished after `timeout` seconds are aborted."""
    await engine.drain(timeout)
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while state.num_requests and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
