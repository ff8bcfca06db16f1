"""Served lines of the comparison: from the command to a server that answers, what it holds in memory, and the time to
the first token of 16 clients that share a prefix of 1,000 tokens which is known already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from engines import EngineFailedError, vllm_environment
from process_memory import resident_bytes

__all__ = ["SERVED_TESTS", "RunningServer", "ServerCommand", "measure_server", "running", "server_commands"]

SERVED_TESTS = ("ready_s", "resident_gb", "prefix_ttft_s")
READY_TIMEOUT_S = 300
_CLIENTS = 16


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """How one engine is served.

    Args:
        name: As in the table.
        command: Without a port.
        path: What answers 200 once requests are taken.
        env: Over this process's environment.
    """

    name: str
    command: list[str]
    path: str = "/health"
    env: dict[str, str] = field(default_factory=dict)


def server_commands(
    ours: str, gguf: str | None, llama_bin: Path | None, vllm_python: Path | None, folder: str | None, threads: int
) -> list[ServerCommand]:
    """The servers of one model: `ours` is what we load, `gguf` what llama.cpp does, `folder` what vLLM does."""
    core = str(Path(sys.executable).parent / "core")
    found = [
        ServerCommand(name="ours", command=[core, "serve", ours, "--threads", str(threads), "--quantize-activations"])
    ]
    if llama_bin is not None and gguf is not None:
        slots = ["-c", str(_CLIENTS * 2048), "-np", str(_CLIENTS)]
        command = [str(llama_bin / "llama-server"), "-m", gguf, "-t", str(threads), "-tb", str(threads), *slots]
        found.append(ServerCommand(name="llama.cpp", command=[*command, "--no-webui"]))
    if vllm_python is not None and folder is not None:
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", "bfloat16"]
        bounds = ["--max-model-len", "4096", "--max-num-seqs", "64", "--enable-prefix-caching"]
        env = vllm_environment(vllm_python, threads)
        found.append(ServerCommand(name="vLLM-CPU", command=[str(vllm_python), *module, *bounds], env=env))
    return found


@dataclass(frozen=True)
class RunningServer:
    """A server that takes requests.

    Args:
        url: Without a path.
        pid: Of the process that was started; others may live below it.
        ready_s: Seconds from the command to ready.
    """

    url: str
    pid: int
    ready_s: float


@contextlib.contextmanager
def running(server: ServerCommand) -> Iterator[RunningServer]:
    """Starts a server, and ends it and all that it started.

    Raises:
        EngineFailedError: it ended, or was not ready in time.
    """
    port = _free_port()
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*server.command, "--port", str(port)],
        env={**os.environ, **server.env},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_ready(process, f"http://127.0.0.1:{port}{server.path}", server.name)
        yield RunningServer(f"http://127.0.0.1:{port}", process.pid, time.perf_counter() - begin)
    finally:
        _end(process)


def measure_server(server: ServerCommand) -> dict[str, float]:
    """A figure for each of SERVED_TESTS.

    Raises:
        EngineFailedError: the server could not be measured.
    """
    with running(server) as found:
        ttft = _shared_prefix(found.url)
        return dict(zip(SERVED_TESTS, (found.ready_s, resident_bytes(found.pid) / 1e9, ttft), strict=True))


def _await_ready(process: subprocess.Popen[bytes], url: str, name: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineFailedError(f"the server of {name} ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=1) as reply:
                if reply.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    raise EngineFailedError(f"the server of {name} was not ready after {READY_TIMEOUT_S} s")


def _shared_prefix(url: str) -> float:
    """Median seconds to the first token; one request before the 16 brings the prefix."""
    core = str(Path(sys.executable).parent / "core")
    shape = {"prefix-len": 1000, "suffix-len": 32, "num-prefixes": 1, "output-len": 32}
    flags = [word for name, value in shape.items() for word in (f"--prefix-repetition-{name}", str(value))]
    counts = ["--num-prompts", str(_CLIENTS), "--max-concurrency", str(_CLIENTS), "--num-warmups", "1"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [core, "bench", "serve", "--base-url", url, "--dataset-name", "prefix_repetition", *flags, *counts]
        done = subprocess.run(
            [*command, "--save-result", "--result-filename", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise EngineFailedError(f"core bench serve failed: {done.stderr[-500:]}")
        return float(json.loads(path.read_text())["median_ttft_ms"]) / 1e3


def _end(process: subprocess.Popen[bytes]) -> None:
    for sig in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sig)
            process.wait(timeout=20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
