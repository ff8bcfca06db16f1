"""One `core serve` in a process of its own: started as a user would, watched from outside, always ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from core_conformance.served.reaper import watched
from core_conformance.subject import Mismatch

__all__ = ["MODEL_NAME", "PLAIN", "Server", "free_port"]

MODEL_NAME = "m"
"""The model's name in requests."""
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False}
"""For clients: no proxy of the environment on the way to this machine, and no certificates, which take long to read."""
END_S = 60.0
"""Patience with a server that was asked to end."""
_LOG_LINES = 12
_METRIC = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


def free_port() -> int:
    """A TCP port that nobody listened on a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """A server; `start` returns when it is healthy, `stop` when nothing of it is left.

    Args:
        command: The command line up to the flags of the address, `("python", "-m", "core.cli", "serve", "MODEL")`.
        environment: Over this process's.
        start_seconds: Patience with it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], start_seconds: float) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*command, "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL_NAME]
        self.start_answers: list[tuple[int, dict[str, Any]]] = []
        """What /health said until it was healthy: status and body, repeats left out."""
        self.start_s = 0.0
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **environment}
        self._patience = start_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="core-conformance-server-")
        self._log_path = Path(self._folder.name) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._watch = contextlib.ExitStack()

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts it and waits until /health says 200.

        Raises:
            Mismatch: it ended, or was not healthy in time; the message holds the end of its log.
        """
        begin = time.monotonic()
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._watch.enter_context(watched(self._process.pid))
        try:
            self._wait_healthy(begin + self._patience)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begin

    def _wait_healthy(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            if (code := self.process.poll()) is not None:
                raise Mismatch(f"`core serve` ended with exit code {code} at its start: {self.log_end()}")
            with contextlib.suppress(httpx.TransportError):
                answer = self.get("/health")
                if answer.status_code == 200:
                    return
                seen = (answer.status_code, answer.json())
                if seen not in self.start_answers:
                    self.start_answers.append(seen)
            time.sleep(0.05)
        raise Mismatch(f"`core serve` was not healthy after {self._patience:g} s: {self.log_end()}")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The server's process."""
        assert self._process is not None, "the server was not started"
        return self._process

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def stop(self, patience_s: float = END_S) -> int:
        """SIGTERM, then force; returns the exit code. Nothing of its process tree is left."""
        family = self.family()
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise Mismatch(f"the server did not end {patience_s:g} s after SIGTERM: {self.log_end()}") from None
        finally:
            _kill(family)
            self.process.wait()
            self._watch.close()

    def family(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    # -- what it says ------------------------------------------------------------------------------------------------

    def log(self) -> str:
        """What it wrote so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    def log_end(self) -> str:
        """The last lines of its log in one line."""
        return " | ".join(self.log().strip().splitlines()[-_LOG_LINES:]) or "its log is empty"

    def client(self, timeout: float = 120.0) -> httpx.Client:
        """A client of this server; the caller closes it."""
        return httpx.Client(base_url=self.url, timeout=timeout, **PLAIN)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """One GET on a connection of its own."""
        with self.client() as client:
            return client.get(path, headers={"Connection": "close", **headers})

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """One POST on a connection of its own; bytes are sent as they are, anything else as JSON."""
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        with self.client() as client:
            return client.post(path, **given, headers={"Connection": "close", **headers})

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name, those of different labels added up."""
        found: dict[str, float] = {}
        for match in self._metric_lines():
            found[match["name"]] = found.get(match["name"], 0.0) + float(match["value"])
        return found

    def metric_labels(self, name: str) -> dict[str, str]:
        """Labels of the first sample of a metric."""
        match = next((match for match in self._metric_lines() if match["name"] == name), None)
        return {} if match is None else dict(re.findall(r'(\w+)="([^"]*)"', match["labels"] or ""))

    def _metric_lines(self) -> list[re.Match[str]]:
        lines = self.get("/metrics").text.splitlines()
        return [match for line in lines if (match := _METRIC.fullmatch(line)) is not None]


def _kill(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
