"""vLLM as a worker of `compare.py`, run by the Python of vLLM's own environment."""

from __future__ import annotations

import json
import random
import sys
import time

started = time.perf_counter()

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.inputs import TokensPrompt  # noqa: E402


def main() -> None:
    """Answers tests until standard input ends."""
    model, dtype = sys.argv[1:3]
    llm = LLM(
        model=model,
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    _say({"engine": "vLLM-CPU", "ready_s": round(time.perf_counter() - started, 1)})
    rng = random.Random(0)

    def seconds(count: int, num_in: int, num_out: int) -> float:
        prompts = [
            TokensPrompt(prompt_token_ids=[rng.randrange(1000, 48000) for _ in range(num_in)]) for _ in range(count)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for line in sys.stdin:
        kind, _, size = line.strip().partition("_")
        if kind == "single":
            _say({"rate": 127 / (seconds(1, 128, 128) - seconds(1, 128, 1))})
        elif kind == "prefill":
            _say({"rate": int(size) / seconds(1, int(size), 1)})
        else:
            _say({"rate": int(size) * 128 / seconds(int(size), 128, 128)})


def _say(value: dict[str, object]) -> None:
    print("bench:" + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
