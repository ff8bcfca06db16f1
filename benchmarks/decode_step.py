"""Time of a decode step, recorded and call by call, in turn in one process.

    python benchmarks/decode_step.py MODEL [--device cpu] [--requests 1] [--tokens 48] [--rounds 5]
        [--quantize-activations] [--deterministic] [--profile | --host]

Prints the smallest and the median milliseconds a step, by the clock and of processor time. A model of many layers and
hardly any width shows what the host costs. `--profile` (device cpu) prints instead where the recorded calls spend it,
`--host` (device cpu) what Python does beside the kernels: processor time of the runner's thread and of the engine's.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from core.llm import LLM
from core.sampling_params import SamplingParams

WARM_UP = 4


def run(llm: LLM, requests: int, tokens: int) -> tuple[float, float]:
    """(seconds by the clock, seconds of processor time) of one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5, 6, 7 + index] for index in range(requests)]
    cpu, wall = time.process_time(), time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - wall, time.process_time() - cpu


def profile(llm: LLM, requests: int, tokens: int) -> None:
    """Prints milliseconds a step of each operation, from the medians of its calls; the head is in no recording."""
    from core_cpu.recording import CpuGraph

    steps: list[list[tuple[str, float]]] = []

    def replay(graph: CpuGraph, _: Sequence[object]) -> Any:
        steps.append(graph.profile())
        return graph._result

    run(llm, requests, WARM_UP)
    CpuGraph.replay = replay  # type: ignore[method-assign,assignment]
    run(llm, requests, tokens)
    whole = [step for step in steps if len(step) == max(map(len, steps))]
    totals: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for calls in zip(*whole, strict=True):
        totals[calls[0][0]] += statistics.median(seconds for _, seconds in calls)
        counts[calls[0][0]] += 1
    for name, seconds in totals.most_common():
        print(f"{name:20} {seconds * 1e3:8.3f} ms in {counts[name]} calls")
    print(f"{'all':20} {sum(totals.values()) * 1e3:8.3f} ms, medians of {len(whole)} steps")


def host(llm: LLM, requests: int, tokens: int) -> None:
    """Prints medians over the steps that hold one token of every request; the head and the draw count as kernels."""
    from core.engine.engine import Engine
    from core.exec.model_runner import ModelRunner
    from core_cpu.operations import Sample
    from core_cpu.recording import CpuGraph

    runner: list[float] = []
    engine: list[float] = []
    in_kernels = 0.0

    def kernels(owner: type, name: str) -> None:
        honest = getattr(owner, name)

        def timed(*args: Any) -> Any:
            nonlocal in_kernels
            start = time.thread_time()
            result = honest(*args)
            in_kernels += time.thread_time() - start
            return result

        setattr(owner, name, timed)

    def steps(owner: type, name: str, found: list[float], counts: Callable[[Any, Any], bool]) -> None:
        honest = getattr(owner, name)

        def timed(*args: Any) -> Any:
            before, start = in_kernels, time.thread_time()
            result = honest(*args)
            spent = time.thread_time() - start
            if counts(args, result):
                found.append(spent - (in_kernels - before if found is runner else 0.0))
            return result

        setattr(owner, name, timed)

    for owner, name in ((CpuGraph, "replay"), (ModelRunner, "_logits"), (Sample, "__call__")):
        kernels(owner, name)
    steps(ModelRunner, "_execute", runner, lambda args, _: args[1].num_scheduled_tokens == requests)
    steps(Engine, "step", engine, lambda _, news: len(news) == requests)
    run(llm, requests, WARM_UP)
    runner.clear()
    engine.clear()
    run(llm, requests, tokens)
    parts = [statistics.median(found[2:]) * 1e3 for found in (runner, engine)]
    print(f"{requests} requests: runner {parts[0]:.3f} ms a step, engine {parts[1]:.3f} ms, both {sum(parts):.3f} ms")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quantize-activations", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--host", action="store_true")
    args = parser.parse_args()
    common: dict[str, Any] = {
        "device": args.device,
        "max_num_seqs": args.requests,
        "num_blocks": 64 + 16 * args.requests,
        "quantize_activations": args.quantize_activations,
        "deterministic": args.deterministic,
    }
    if args.profile or args.host:
        with LLM(args.model, **common) as llm:
            (profile if args.profile else host)(llm, args.requests, args.tokens)
        return
    with LLM(args.model, enforce_eager=True, **common) as eager, LLM(args.model, **common) as recorded:
        engines = {"call by call": eager, "recorded": recorded}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for llm in engines.values():
            run(llm, args.requests, WARM_UP)
        for _ in range(args.rounds):
            for name, llm in engines.items():
                short, long = (run(llm, args.requests, count) for count in (WARM_UP, WARM_UP + args.tokens))
                wall, cpu = ((b - a) / args.tokens * 1e3 for a, b in zip(short, long, strict=True))
                found[name].append((wall, cpu))
    for name, steps in found.items():
        wall, cpu = zip(*steps, strict=True)
        print(
            f"{name:13} wall {min(wall):7.2f} ms a step (median {statistics.median(wall):.2f}), "
            f"cpu {min(cpu):7.2f} ms (median {statistics.median(cpu):.2f})"
        )


if __name__ == "__main__":
    main()
