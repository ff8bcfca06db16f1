"""`core bench offline`: the engine alone, all requests at once."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from core.cli.bench_data import random_requests
from core.cli.bench_report import result_file, show
from core.errors import ConfigError
from core.sampling_params import SamplingParams

__all__ = ["run_offline_bench"]


def run_offline_bench(
    model: str, engine_args: Mapping[str, Any], num_prompts: int, input_len: int, output_len: int, path: str | None
) -> None:
    """Loads the model in this process, measures one batch, and shows vLLM's throughput fields.

    Raises:
        CoreError: the model cannot be served, or the requests do not fit it.
    """
    from core.llm import LLM

    for flag, value in (("--num-prompts", num_prompts), ("--input-len", input_len), ("--output-len", output_len)):
        if value < 1:
            raise ConfigError(f"{flag} must be at least 1, got {value}")
    place = result_file(path)
    with LLM(model, **engine_args) as llm:
        requests = random_requests(
            num_prompts, input_len, output_len, range_ratio=0.0, vocab_size=llm.facts.vocab_size, seed=0
        )
        prompts = [request.prompt for request in requests]
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        llm.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - begin
    tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    result = {
        "elapsed_time": seconds,
        "num_requests": num_prompts,
        "total_num_tokens": num_prompts * input_len + tokens,
        "requests_per_second": num_prompts / seconds,
        "tokens_per_second": (num_prompts * input_len + tokens) / seconds,
        "output_tokens_per_second": tokens / seconds,
    }
    show(result, f"{model}, {num_prompts} requests of {input_len} + {output_len} tokens")
    if place is not None:
        place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
