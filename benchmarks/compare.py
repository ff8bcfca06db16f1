"""Ours beside other engines, in one run: ours, peer, ours, peer; medians, ratios, shares of what the machine can do.

    python benchmarks/compare.py [--folder DIR] [--peers llama.cpp vllm openvino] [--models ...] [--schemes ...]

`--folder` holds the peers and the models; what is missing there is installed and made first (`peers.py`, `models.py`).
Each test of each round runs all engines one after the other, so that a machine that drifts drifts for all; each engine
stays loaded meanwhile. The ceilings of the machine are measured before each round.

single: tokens a second of one stream, 128 after a prompt of 128. prefill_N: prompt tokens a second of one prompt.
batch_N: output tokens a second of N requests of 128 in and 128 out, over the whole wall time. The served lines
(`servers.py`): seconds from the command to ready, memory, and time to the first token behind a shared prefix.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ceilings import Ceilings, build_ceilings, limit
from engines import Engine, EngineFailedError, LlamaCpp, openvino, ours, vllm
from models import MODELS, SCHEMES, ModelFiles, make_models, model_costs
from peers import PEERS, Peers
from process_memory import cpu_seconds
from report import markdown_table, share_plot
from servers import SERVED_TESTS, measure_server, server_commands

HERE = Path(__file__).parent
TESTS = ("single", "prefill_512", "prefill_2048", "batch_32")


class Comparison:
    """One run: what was asked for, and what was found up to now.

    Args:
        options: As parsed.
        peers: Installed.
    """

    def __init__(self, options: argparse.Namespace, peers: Peers) -> None:
        self.options = options
        self.peers = peers
        self.lines: dict[str, dict[str, Any]] = {}
        self.engines: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.ceilings: list[dict[str, object]] = []
        self.began = time.monotonic()
        self.busy, self.own = _cpu_seconds(), cpu_seconds(os.getpid())

    def run_group(self, model: str, scheme: str) -> None:
        """All tests of a model in one scheme, all rounds."""
        files = make_models(model, self.peers.folder / "models")
        costs = model_costs(files.path(scheme, gguf=True), quantized=scheme != "bf16")
        program = build_ceilings(self.peers.folder)
        ceilings = Ceilings(program, self.options.threads, [costs.weight_bytes])
        engines = self._open(model, scheme, files) if self.options.tests else []
        for number in range(self.options.rounds + 1 if engines else 0):
            if self._late():
                break
            ceilings.measure()
            for test in self.options.tests if number else self.options.warm_up or self.options.tests:
                for engine in list(engines):
                    self._run(engine, engines, f"{model} {scheme} {test}", number)
            for test in self.options.tests:
                line = self.lines.get(f"{model} {scheme} {test}")
                if line is not None:
                    line["limit"] = limit(test, costs, ceilings)
            self.ceilings += ceilings.runs[-1:]
            self.write()
        for engine in engines:
            engine.close()
        if not self._late():
            self._serve(model, scheme, files)

    def write(self) -> None:
        """Writes what was found up to now: a run that is stopped keeps it."""
        options = self.options
        words = [Path(word).name if "/" in word else word for word in sys.argv]
        used = _cpu_seconds() - self.busy - (cpu_seconds(os.getpid()) - self.own)
        foreign = max(0.0, used) / ((time.monotonic() - self.began) * (os.cpu_count() or 1))
        record = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()},
            "state": options.state,
            "command": shlex.join(words),
            "rounds": options.rounds,
            "foreign_share": round(foreign, 3),
            "ceilings": self.ceilings,
            "engines": self.engines,
            "failures": self.failures,
            "lines": self.lines,
        }
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        table = markdown_table(self.lines)
        rounds = max((len(found) for line in self.lines.values() for found in line["rates"].values()), default=0)
        note = f"{record['when']}, {_processor()}, {options.threads} threads, medians of {rounds} rounds"
        note += f", others used {foreign:.0%} of the cores meanwhile"
        if options.state:
            note += f". {options.state}"
        failures = "".join(f"\n- {failure}" for failure in self.failures)
        text = f"{note}\n\n{table}\n{failures}" + ("\n" if failures else "")
        (folder / f"{options.out}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (folder / f"{options.out}.md").write_text(text, encoding="utf-8")
        (folder / f"{options.out}.svg").write_text(share_plot(self.lines, note[:110]), encoding="utf-8")

    def _open(self, model: str, scheme: str, files: ModelFiles) -> list[Engine]:
        options, threads = self.options, self.options.threads
        arguments = {"dtype": "bfloat16", "num_threads": threads, **json.loads(options.ours_args)}
        arguments.setdefault("quantize_activations", scheme != "bf16")  # as the peers do
        folder, gguf = str(files.path(scheme, gguf=False)), str(files.path(scheme, gguf=True))
        makers: list[Callable[[], Engine]] = [lambda: ours(folder, arguments)]
        python, programs = self.peers.vllm, self.peers.llama_cpp
        if python is not None and scheme == "bf16":
            makers.append(lambda: vllm(python, folder, "bfloat16", threads))
        if programs is not None:
            makers.append(lambda: LlamaCpp(str(programs), gguf, threads))
        other = self.peers.openvino
        if other is not None and scheme != "bf16":
            makers.append(lambda: openvino(other, gguf, threads))
        engines: list[Engine] = []
        for make in makers:
            try:
                engines.append(make())
                self._ready(model, scheme, engines[-1])
                print(f"{model} {scheme} {engines[-1].name} is ready", flush=True)
            except EngineFailedError as error:
                self._fail(f"{model} {scheme}: {error}")
        return engines

    def _ready(self, model: str, scheme: str, engine: Engine) -> None:
        self.engines.append({"model": model, "scheme": scheme, **engine.ready})
        if engine.name == "OpenVINO":  # it brings no server: from the command to a pipeline that answers
            self._note(f"{model} {scheme} ready_s", engine.name, engine.ready["ready_s"])
            self._note(f"{model} {scheme} resident_gb", engine.name, engine.ready["resident_bytes"] / 1e9)

    def _run(self, engine: Engine, engines: list[Engine], title: str, number: int) -> None:
        try:
            rate = engine.run(title.rpartition(" ")[2])
        except (EngineFailedError, BrokenPipeError) as error:
            self._fail(f"{title}, {engine.name}: {error}")
            engines.remove(engine)
            return
        print(f"round {number} {title} {engine.name}: {rate:.1f}", flush=True)
        if number:  # round 0 warms up
            self._note(title, engine.name, rate)

    def _serve(self, model: str, scheme: str, files: ModelFiles) -> None:
        """The served lines: each round starts each server anew."""
        if not self.options.served_rounds:
            return
        vllm_python = self.peers.vllm if scheme == "bf16" else None
        folder, gguf = str(files.path(scheme, gguf=False)), str(files.path(scheme, gguf=True))
        commands = server_commands(folder, gguf, self.peers.llama_cpp, vllm_python, folder, self.options.threads)
        for number in range(self.options.served_rounds):
            for server in commands:
                if number and server.name == "vLLM-CPU":
                    continue  # it takes more than a minute to be ready, and the figure hardly moves
                try:
                    found = measure_server(server)
                except EngineFailedError as error:
                    self._fail(f"{model} {scheme} served, {server.name}: {error}")
                    continue
                for test in SERVED_TESTS:
                    self._note(f"{model} {scheme} {test}", server.name, found[test])
                print(f"served {number} {model} {scheme} {server.name}: {found}", flush=True)
            self.write()

    def _note(self, title: str, name: str, figure: float) -> None:
        line = self.lines.setdefault(title, {"limit": None, "rates": {}})
        line["rates"].setdefault(name, []).append(round(figure, 4))

    def _fail(self, what: str) -> None:
        self.failures.append(what)
        print(what, flush=True)

    def _late(self) -> bool:
        return time.monotonic() - self.began > 60 * self.options.max_minutes


def main() -> None:
    """Runs the comparison and writes results/NAME.json, results/NAME.md and results/NAME.svg."""
    options = _parse()
    peers = Peers(options.folder, [] if options.peers == ["none"] else options.peers)
    peers.install()
    comparison = Comparison(options, peers)
    for model in options.models:
        for scheme in options.schemes:
            comparison.run_group(model, scheme)
    comparison.write()
    print(markdown_table(comparison.lines))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE.parent / ".nox" / "peers", help="peers and models")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, "none"], default=list(PEERS))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--tests", nargs="*", default=list(TESTS))
    parser.add_argument("--warm-up", nargs="+", help="tests of the round that does not count; all of them by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--served-rounds", type=int, default=1, help="0 leaves the served lines out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ours-args", default="{}", help="JSON, more arguments of LLM")
    parser.add_argument("--max-minutes", type=float, default=1e9, help="start no round after it")
    parser.add_argument("--state", default="", help="a sentence on the state of the machine, for the result")
    parser.add_argument("--out", default="peers")
    return parser.parse_args()


def _cpu_seconds() -> float:
    """Seconds of all cores that somebody used since the machine started."""
    words = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    return (sum(words) - words[3] - words[4]) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
