"""What the prefix cache gives and what it costs, for one model.

    python benchmarks/prefix_cache.py MODEL [--prompt-len 1000] [--rounds 5]

Prints the time to the first token of a prompt that nobody has sent and of the same prompt again, in turn, and what the
cache's bookkeeping takes of the first where nothing is ever found: thread time of the scheduler's part for as many
prompts with the cache and without, against the time that the model needs.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from scheduler_overhead import layer

from core.config import SchedulerConfig
from core.kv import KVCacheGroups, KVCacheManager
from core.llm import LLM, TokensPrompt
from core.request import EngineRequest
from core.sampling_params import SamplingParams
from core.sched import ModelRunnerOutput, Scheduler


def first_token_s(llm: LLM, prompt: list[int]) -> float:
    """Seconds from the call to the first and only token."""
    begin = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([TokensPrompt(prompt_token_ids=prompt)], params, use_tqdm=False)
    return time.perf_counter() - begin


def host_s(prompts: list[list[int]], *, prefix_caching: bool) -> float:
    """Thread time of the scheduler for prompts with one output token each, per prompt."""
    kv = KVCacheManager(KVCacheGroups.from_layers([layer()]), 20_000, 16, enable_prefix_caching=prefix_caching)
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096)
    scheduler = Scheduler(config, kv)
    begin = time.thread_time()
    for index, prompt in enumerate(prompts):
        source = EngineRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
        )
        scheduler.add_request(source)
        while scheduler.has_work():
            output = scheduler.schedule()
            sampled = {share.request_id: [5] for share in output.scheduled if share.samples}
            scheduler.update(output, ModelRunnerOutput(step_id=output.step_id, sampled_token_ids=sampled))
    return (time.thread_time() - begin) / len(prompts)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt-len", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng = random.Random(0)

    def prompt() -> list[int]:
        return [rng.randrange(100, 10_000) for _ in range(args.prompt_len)]

    cold, hit = [], []
    with LLM(args.model, max_num_seqs=4) as llm:
        first_token_s(llm, prompt())
        for _ in range(args.rounds):
            ids = prompt()
            cold.append(first_token_s(llm, ids))
            hit.append(first_token_s(llm, ids))
    shares = [100 * b / a for a, b in zip(cold, hit, strict=True)]
    print(
        f"first token of {args.prompt_len} tokens: cold {1e3 * statistics.median(cold):.1f} ms, "
        f"full hit {1e3 * statistics.median(hit):.1f} ms, {statistics.median(shares):.1f} % of it"
    )
    prompts = [prompt() for _ in range(100)]
    costs = [(host_s(prompts, prefix_caching=True), host_s(prompts, prefix_caching=False)) for _ in range(args.rounds)]
    on, off = (min(column) for column in zip(*costs, strict=True))
    extra = 100 * (on - off) / min(cold)
    print(
        f"at 0 % hits the scheduler takes {1e3 * on:.3f} ms a prompt with the cache and {1e3 * off:.3f} ms without: "
        f"{extra:.2f} % of the fastest cold first token"
    )


if __name__ == "__main__":
    main()
