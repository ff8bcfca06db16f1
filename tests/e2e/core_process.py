"""`core` in processes of its own: commands that end, and servers that are always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import httpx
import psutil

__all__ = ["CoreServer", "default_device", "free_port", "has_backend", "run_core", "served"]

START_S = 180.0
"""Patience with a server that loads; far above what one needs alone."""
END_S = 60.0


def has_backend(name: str) -> bool:
    """Whether a package announces a backend of this name."""
    return any(entry.name == name for entry in entry_points(group="core.backends"))


def default_device() -> str:
    """`CORE_E2E_DEVICE`, else the CPU backend where it is installed, else the simulated one."""
    return os.environ.get("CORE_E2E_DEVICE") or ("cpu" if has_backend("cpu") else "sim")


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with wide plain output and without any road to a hub."""
    return {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", **(env or {})}


def command_line(*args: str) -> list[str]:
    """`core ARGS` as run by this interpreter."""
    return [sys.executable, "-m", "core.cli", *args]


def run_core(
    *args: str, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Runs `core ARGS` to its end. The exit code is the caller's to check."""
    return subprocess.run(
        command_line(*args),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=cwd,
        env=environment(env),
    )


class CoreServer:
    """A running `core serve`; made by `served`.

    Args:
        process: The server.
        url: Where it listens.
        log_path: Its standard error.
    """

    def __init__(self, process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
        self.process = process
        self.url = url
        self.log_path = log_path
        self.model = "m"
        """Name for requests."""

    def log(self) -> str:
        """What the server wrote so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def client(self, timeout: float = 120.0) -> httpx.Client:
        """A client of this server; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=timeout)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """One POST of a JSON body."""
        with self.client() as client:
            return client.post(path, json={"model": self.model, **body})

    def get(self, path: str) -> httpx.Response:
        """One GET."""
        with self.client() as client:
            return client.get(path)

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name, labels left out and their values added up."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").text.splitlines():
            match = re.fullmatch(r"([\w:]+)(?:\{.*\})? (\S+)", line)
            if match:
                found[match[1]] = found.get(match[1], 0.0) + float(match[2])
        return found

    def engine_pid(self) -> int:
        """The engine's process."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("core.engine.process" in part for part in child.cmdline()):
                    return child.pid
        raise AssertionError(f"the server has no engine process:\n{self.log()}")

    def wait_healthy(self, patience_s: float = START_S) -> None:
        """Returns when /health says 200; fails with the log where the server ends or is not ready in time."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with exit code {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10.0).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the server was not healthy after {patience_s:g} s:\n{self.log()}")

    def terminate(self, patience_s: float = END_S) -> int:
        """Sends SIGTERM and gives the exit code; kills what does not end, children included."""
        family = _family(self.process.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not end {patience_s:g} s after SIGTERM:\n{self.log()}") from None
        finally:
            _kill(family)
            self.process.wait()


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    return []


def _kill(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def served(
    model: str | Path,
    *flags: str,
    device: str | None = None,
    name: str | None = "m",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[CoreServer]:
    """A healthy `core serve MODEL FLAGS` on a free port; ended on the way out, by SIGTERM, then by force.

    Args:
        model: As for the command.
        flags: Further ones; host, port, device and name are given last and win.
        device: None takes `default_device()`.
        name: Public name of the model; None leaves it to `flags`, else to `model`.
        env: Over this process's environment.
        cwd: Where the server runs.
    """
    port = free_port()
    device = device or default_device()
    args = ("serve", str(model), *flags, "--host", "127.0.0.1", "--port", str(port), "--device", device)
    if name is not None:
        args = (*args, "--served-model-name", name)
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command_line(*args),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(env),
                cwd=cwd,
            )
        server = CoreServer(process, f"http://127.0.0.1:{port}", log_path)
        server.model = name or str(model)
        try:
            server.wait_healthy()
            yield server
        finally:
            server.terminate()
