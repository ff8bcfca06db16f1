"""vLLM as a worker of `compare.py`, run by the Python of vLLM's own environment."""

from __future__ import annotations

import sys
import time

from worker import answer_tests, say


def main() -> None:
    """Loads the model and answers tests."""
    started = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

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
    say({"engine": "vLLM-CPU", "ready_s": round(time.perf_counter() - started, 1)})

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)

    answer_tests(generate)


if __name__ == "__main__":
    main()
