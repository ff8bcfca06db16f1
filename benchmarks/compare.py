"""Ours beside other engines, in one run: ours, peer, ours, peer; medians and ratios.

    python benchmarks/compare.py --model DIR --vllm-python VENV/bin/python --llama-bin DIR --gguf FILE --out NAME

`--model` is what ours and vLLM load (a folder), `--gguf` what llama.cpp loads (the same weights); `--ours` replaces the
model for ours (for example with the GGUF file). A peer that is not given is left out. Each test of each round runs all
engines one after the other, so that a machine that drifts drifts for all; each engine stays loaded meanwhile.

single: tokens a second of one stream, 128 after a prompt of 128. prefill_N: prompt tokens a second of one prompt.
batch_N: output tokens a second of N requests of 128 in and 128 out, over the whole wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = ("single", "prefill_512", "prefill_2048", "batch_8", "batch_32")


class Worker:
    """An engine in a process of its own that answers one test a line with a rate."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self.ready = self._answer()

    def run(self, test: str) -> float:
        """Rate of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write(test + "\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("bench:"):
                found: dict[str, Any] = json.loads(line.removeprefix("bench:"))
                return found
        raise SystemExit(f"{self.name} ended early with code {self._process.wait()}; its log is above")


class LlamaCpp:
    """llama.cpp through its own bench tools; each test loads the model anew."""

    name = "llama.cpp"

    def __init__(self, folder: str, gguf: str, threads: int) -> None:
        self._folder, self._common = Path(folder), ["-m", gguf, "-t", str(threads)]
        self.ready: dict[str, Any] = {"engine": "llama.cpp", "model": Path(gguf).name}

    def run(self, test: str) -> float:
        """Rate of one run."""
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
            raise SystemExit(f"{tool} failed: {done.stderr[-2000:]}")
        return done.stdout

    def close(self) -> None:
        """Nothing is kept."""


def main() -> None:
    """Runs the comparison and writes results/NAME.json and results/NAME.md."""
    options = _parse()
    engines = _engines(options)
    rates: dict[str, dict[str, list[float]]] = {test: {e.name: [] for e in engines} for test in options.tests}
    for number in range(options.rounds + 1):
        for test in options.tests if number else options.warm_up or options.tests:
            for engine in engines:
                rate = engine.run(test)
                if number:  # round 0 warms up
                    rates[test][engine.name].append(rate)
                print(f"round {number} {test} {engine.name}: {rate:.1f}", flush=True)
        if number:  # a run that is stopped keeps its whole rounds
            _write(options, number, [engine.ready for engine in engines], rates)
    for engine in engines:
        engine.close()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ours")
    parser.add_argument("--ours-args", default="{}", help="JSON, more arguments of LLM")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--vllm-python")
    parser.add_argument("--llama-bin")
    parser.add_argument("--gguf")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--warm-up", nargs="+", help="tests of the round that does not count; all of them by default")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _engines(options: argparse.Namespace) -> list[Worker | LlamaCpp]:
    engine_args = {"dtype": options.dtype, **json.loads(options.ours_args)}
    command = [sys.executable, str(HERE / "worker_ours.py"), options.ours or options.model, json.dumps(engine_args)]
    engines: list[Worker | LlamaCpp] = [Worker("ours", command, {})]
    if options.vllm_python:
        venv = Path(options.vllm_python).parent.parent
        preload = [str(p) for pattern in ("libiomp5.so", "libtcmalloc_minimal*.so*") for p in venv.rglob(pattern)]
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LD_PRELOAD": ":".join(preload),
        }
        command = [options.vllm_python, str(HERE / "worker_vllm.py"), options.model, options.dtype]
        engines.append(Worker("vLLM-CPU", command, env))
    if options.llama_bin:
        engines.append(LlamaCpp(options.llama_bin, options.gguf, options.threads))
    return engines


def _write(
    options: argparse.Namespace, rounds: int, ready: list[dict[str, Any]], rates: dict[str, dict[str, list[float]]]
) -> None:
    names = [name for name in next(iter(rates.values())) if name != "ours"]
    head = ["test", "ours", *[f"{name} | ours / {name}" for name in names]]
    lines = ["| " + " | ".join(head) + " |", "|---" * (1 + 1 + 2 * len(names)) + "|"]
    for test, by_engine in rates.items():
        ours = statistics.median(by_engine["ours"])
        row = [test, f"{ours:.1f}"]
        for name in names:
            pairs = [a / b for a, b in zip(by_engine["ours"], by_engine[name], strict=True)]
            row += [f"{statistics.median(by_engine[name]):.1f}", f"{statistics.median(pairs):.2f}"]
        lines.append("| " + " | ".join(row) + " |")
    table = "\n".join(lines)
    record = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
        "command": " ".join([Path(sys.argv[0]).name, *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
        "engines": ready,
        "rates": rates,
    }
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{options.out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    note = f"{record['when']}, {_processor()}, {os.cpu_count()} cores, medians of {rounds} interleaved rounds\n"
    (folder / f"{options.out}.md").write_text(f"{note}\n{table}\n", encoding="utf-8")
    print(table)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
