"""Gaps between the tokens of running streams, quiet and while long prompts arrive, of one server.

    python benchmarks/latency_under_load.py MODEL [--streams 4] [--seconds 15] [--prompt-len 2048] [--serve-args "..."]

Starts `core serve MODEL`, runs the streams alone, and then beside a prompt every second. Prints the 50th and 99th
percentile of the gaps of both, their ratio, and the time to the first token of the prompts; `--max-step-stretch 0` in
`--serve-args` shows the same without a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

from servers import ServerCommand, running

from core.cli.bench_client import stream_events
from core.cli.bench_report import percentile


class Load:
    """Requests to one server, and when their tokens came."""

    def __init__(self, url: str, vocab_size: int) -> None:
        self.url = f"{url}/v1/completions"
        self.rng = random.Random(0)
        self.vocab_size = vocab_size
        self.times: list[list[float]] = []
        self.first_tokens: list[float] = []

    async def stream(self, prompt_len: int, max_tokens: int, *, counted: bool) -> None:
        """One request."""
        prompt = [self.rng.randrange(100, self.vocab_size) for _ in range(prompt_len)]
        body = {
            "model": "served",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        begin = time.perf_counter()
        times: list[float] = []
        if counted:
            self.times.append(times)
        async for at, event in stream_events(self.url, body, None):
            if event.get("choices"):
                if not times and not counted:
                    self.first_tokens.append(at - begin)
                times.append(at)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Milliseconds between tokens of counted streams, of those in [begin, end)."""
        return [1e3 * (b - a) for times in self.times for a, b in pairwise(times) if begin <= a and b < end]


async def measure(url: str, args: argparse.Namespace) -> None:
    """Prints one line for each state."""
    load = Load(url, args.vocab_size)
    await load.stream(args.prompt_len, 1, counted=False)  # warm; and the server learns what a prompt costs
    room = args.max_tokens
    streams = [asyncio.ensure_future(load.stream(64, room, counted=True)) for _ in range(args.streams)]
    await asyncio.sleep(3.0)
    begin = time.perf_counter()
    await asyncio.sleep(args.seconds)
    quiet = load.gaps(begin, time.perf_counter())
    load.first_tokens.clear()
    begin, prompts = time.perf_counter(), []
    for _ in range(args.seconds):
        prompts.append(asyncio.ensure_future(load.stream(args.prompt_len, 1, counted=False)))
        await asyncio.sleep(1.0)
    busy = load.gaps(begin, time.perf_counter())
    if not quiet or not busy or any(stream.done() for stream in streams):
        raise SystemExit("the streams ended too soon; give fewer --seconds, or a larger --max-tokens")
    for name, gaps in (("quiet", quiet), (f"a prompt of {args.prompt_len} a second", busy)):
        p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
        print(f"{name:28} {len(gaps):6} gaps: p50 {p50:7.1f} ms, p99 {p99:7.1f} ms, longest {max(gaps):7.1f} ms")
    answered = f"{len(load.first_tokens)} of {len(prompts)} answered"
    if load.first_tokens:
        answered += f", first token after {statistics.median(load.first_tokens):.2f} s (median)"
    print(f"p99 ratio {percentile(busy, 99) / percentile(quiet, 99):.2f}; prompts: {answered}")
    for task in (*streams, *prompts):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def main() -> None:
    """Serves, measures, ends the server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--max-tokens", type=int, default=6000)
    parser.add_argument("--vocab-size", type=int, default=10000)
    parser.add_argument("--serve-args", default="", help="more flags of core serve")
    args = parser.parse_args()
    core = str(Path(sys.executable).parent / "core")
    command = [core, "serve", args.model, "--served-model-name", "served", *shlex.split(args.serve_args)]
    with running(ServerCommand(name="ours", command=command)) as server:
        asyncio.run(measure(server.url, args))


if __name__ == "__main__":
    main()
