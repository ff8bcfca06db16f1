"""What the workers of `compare.py` share: tests come line by line on standard input, rates go out line by line.

Standard library only: it runs in the environments of other engines too.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

__all__ = ["answer_tests", "say"]

Generate = Callable[[list[list[int]], int], None]
"""Generates so many tokens, greedily and past every end, for each prompt of token ids."""


def say(value: dict[str, object]) -> None:
    """Sends one answer to `compare.py`; everything else on standard output is ignored there."""
    print("bench:" + json.dumps(value), flush=True)


def answer_tests(generate: Generate) -> None:
    """Runs tests until standard input ends."""
    rng = random.Random(0)

    def seconds(count: int, num_in: int, num_out: int) -> float:
        prompts = [[rng.randrange(1000, 48000) for _ in range(num_in)] for _ in range(count)]
        start = time.perf_counter()
        generate(prompts, num_out)
        return time.perf_counter() - start

    for line in sys.stdin:
        kind, _, size = line.strip().partition("_")
        if kind == "single":
            say({"rate": 127 / (seconds(1, 128, 128) - seconds(1, 128, 1))})
        elif kind == "prefill":
            say({"rate": int(size) / seconds(1, int(size), 1)})
        else:
            say({"rate": int(size) * 128 / seconds(int(size), 128, 128)})
