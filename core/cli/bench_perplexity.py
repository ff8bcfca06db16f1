"""`core bench perplexity`: what a model, as it is served here, makes of a fixed text."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.cli.bench_report import result_file
from core.errors import ConfigError
from core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from core.llm import LLM

__all__ = ["perplexity", "run_perplexity_bench", "shipped_text", "windows"]

SHIPPED = "alice_chapters_1_to_4.txt"
"""Lewis Carroll, Alice's Adventures in Wonderland (1865), chapters I to IV: public domain, about 12,000 tokens."""


def shipped_text() -> str:
    """The text that comes with the package."""
    return (files("core.cli") / "texts" / SHIPPED).read_text(encoding="utf-8")


def windows(tokens: Sequence[int], length: int, num_tokens: int | None = None) -> list[list[int]]:
    """The first `num_tokens` of a text in runs of `length`; a rest of fewer than two tokens predicts nothing."""
    kept = list(tokens[:num_tokens])
    return [kept[i : i + length] for i in range(0, len(kept), length) if len(kept) - i >= 2]


def perplexity(llm: LLM, prompts: Sequence[list[int]]) -> tuple[float, int]:
    """exp of the mean negative logprob of every token behind the first of its window, and how many those are."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    total, count = 0.0, 0
    for output in llm.generate([*prompts], params, use_tqdm=False):
        assert output.prompt_logprobs is not None, output.request_id
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        total -= sum(entry.logprobs[0] for entry in entries)
        count += len(entries)
    return math.exp(total / count), count


def run_perplexity_bench(
    model: str, engine_args: Mapping[str, Any], text: str | None, window: int, num_tokens: int | None, path: str | None
) -> None:
    """Loads the model in this process and shows the perplexity of a text.

    Raises:
        CoreError: the text cannot be read or is too short, or the model cannot be served.
    """
    from core.llm import LLM

    if window < 2:
        raise ConfigError(f"--window must be at least 2, got {window}")
    if num_tokens is not None and num_tokens < 2:
        raise ConfigError(f"--num-tokens must be at least 2, got {num_tokens}")
    place = result_file(path)
    try:
        words = shipped_text() if text is None else Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text!r} cannot be read: {error}; give a file in UTF-8") from None
    with LLM(model, **{"enable_prefix_caching": False, **engine_args}) as llm:
        if window >= llm.facts.max_model_len:
            limit = llm.facts.max_model_len
            raise ConfigError(f"--window {window} must be below the context of {limit} tokens; give a smaller one")
        prompts = windows(llm.get_tokenizer().encode(words), window, num_tokens)
        if not prompts:
            raise ConfigError(f"{text or SHIPPED} has fewer than 2 tokens, of which one predicts the other; give more")
        begin = time.perf_counter()
        value, count = perplexity(llm, prompts)
        seconds = time.perf_counter() - begin
    result = {"perplexity": value, "num_tokens": count, "window": window, "elapsed_time": seconds}
    sys.stdout.write(f"{model}, {text or SHIPPED}: perplexity {value:.4f} over {count} tokens, {seconds:.1f} s\n")
    if place is not None:
        place.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
