"""Our engine as a worker of `compare.py`."""

from __future__ import annotations

import json
import sys
import time

from worker import answer_tests, say


def main() -> None:
    """Loads the model and answers tests."""
    started = time.perf_counter()
    from core import LLM, SamplingParams
    from core.llm import TokensPrompt

    model, arguments = sys.argv[1], json.loads(sys.argv[2])
    with LLM(model, **{"max_model_len": 4096, "max_num_seqs": 64, "enable_prefix_caching": False, **arguments}) as llm:
        took = round(time.perf_counter() - started, 1)
        say({"engine": "ours", "resolved": llm.facts.resolved, "ready_s": took})

        def generate(prompts: list[list[int]], num_tokens: int) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)

        answer_tests(generate)


if __name__ == "__main__":
    main()
