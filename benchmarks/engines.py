"""The engines that `compare.py` runs in turn: workers in processes of their own, and llama.cpp's bench tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from process_memory import resident_bytes

__all__ = ["Engine", "EngineFailedError", "LlamaCpp", "Worker", "openvino", "ours", "vllm"]

HERE = Path(__file__).parent
READY_TIMEOUT_S = 600


class EngineFailedError(Exception):
    """An engine that cannot run this model, or a test of it; says why."""


class Worker:
    """An engine in a process of its own that answers one test a line with a rate.

    Args:
        name: As in the table.
        command: Prints "bench:" and JSON once when it is ready and once for each test.
        env: Over this process's environment.

    Raises:
        EngineFailedError: it ended before it was ready.
    """

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name = name
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self.ready = self._answer()
        self.ready["ready_s"] = round(time.perf_counter() - begin, 2)
        self.ready["resident_bytes"] = resident_bytes(self._process.pid)

    def run(self, test: str) -> float:
        """Rate of one run.

        Raises:
            EngineFailedError: the process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(test + "\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("bench:"):
                found: dict[str, Any] = json.loads(line.removeprefix("bench:"))
                return found
        raise EngineFailedError(f"{self.name} ended early with code {self._process.wait()}; its log is above")


class LlamaCpp:
    """llama.cpp through its own bench tools; each test loads the model anew.

    Args:
        folder: Where its programs are.
        gguf: The model.
        threads: As for everybody.
    """

    name = "llama.cpp"

    def __init__(self, folder: str, gguf: str, threads: int) -> None:
        self._folder, self._common = Path(folder), ["-m", gguf, "-t", str(threads)]
        self.ready: dict[str, Any] = {"engine": "llama.cpp", "model": Path(gguf).name}

    def run(self, test: str) -> float:
        """Rate of one run.

        Raises:
            EngineFailedError: the tool failed.
        """
        kind, _, size = test.partition("_")
        if kind == "batch":
            return self._batch(int(size))
        shape = ["-p", "0", "-n", "128", "-d", "128"] if kind == "single" else ["-p", size, "-n", "0"]
        out = self._call("llama-bench", [*self._common, *shape, "-r", "1", "-o", "json"])
        return float(json.loads(out)[-1]["avg_ts"])

    def _batch(self, count: int) -> float:
        shape = ["-c", str(count * 256 + 256), "-npp", "128", "-ntg", "128", "-npl", str(count)]
        out = self._call("llama-batched-bench", [*self._common, *shape, "--output-format", "jsonl"])
        row = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
        return count * 128 / float(row["t"])

    def _call(self, tool: str, arguments: list[str]) -> str:
        done = subprocess.run([str(self._folder / tool), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EngineFailedError(f"{tool} failed: {done.stderr[-2000:]}")
        return done.stdout

    def close(self) -> None:
        """Nothing is kept."""


Engine = Worker | LlamaCpp


def ours(model: str, arguments: dict[str, Any]) -> Worker:
    """This project's engine; `arguments` are those of `LLM`."""
    return Worker("ours", [sys.executable, str(HERE / "worker_ours.py"), model, json.dumps(arguments)], {})


def vllm(python: Path, model: str, dtype: str, threads: int) -> Worker:
    """vLLM for CPUs, by the Python of its own environment."""
    return Worker(
        "vLLM-CPU", [str(python), str(HERE / "worker_vllm.py"), model, dtype], vllm_environment(python, threads)
    )


def vllm_environment(python: Path, threads: int) -> dict[str, str]:
    """What makes vLLM fast on a CPU: its own OpenMP and allocator, threads bound to cores."""
    venv = python.parent.parent
    preload = [str(p) for pattern in ("libiomp5.so", "libtcmalloc_minimal*.so*") for p in venv.rglob(pattern)]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "LD_PRELOAD": ":".join(preload),
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
    }


def openvino(python: Path, gguf: str, threads: int) -> Worker:
    """OpenVINO GenAI, by the Python of its own environment."""
    return Worker("OpenVINO", [str(python), str(HERE / "worker_openvino.py"), gguf, str(threads)], {})
