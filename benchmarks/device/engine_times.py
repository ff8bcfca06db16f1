"""Decode and prefill of a whole model through the engine, and what of a step the host keeps the device waiting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.llm import LLM
from core.sampling_params import SamplingParams
from core_conformance.engines.models import write_tokenizer
from core_triton.roofline import Chip

__all__ = ["measure_engine"]

_FULL = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
_QUICK = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}


def measure_engine(device: str, chip: Chip, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Rates, shares of the measured roofline, and the host's gap.

    Args:
        device: NAME or NAME:INDEX.
        chip: Bandwidth and rates as they were measured in this run.
        folder: Where the model of random weights is put.
        quick: A model of one small layer, a few tokens.
    """
    weights = _write_model(folder, quick)
    requests, prompt, tokens = (1, 20, 3) if quick else (32, 900, 64)
    with LLM(
        str(folder), device=device, max_num_seqs=requests, max_num_batched_tokens=64 if quick else 4096,
        max_model_len=64 if quick else 2048, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        _seconds(llm, 1, prompt, tokens)
        prefill_s = _seconds(llm, 1, prompt, 1)
        single_s = _decode_seconds(llm, 1, prompt, tokens)
        batch_s = _decode_seconds(llm, requests, prompt, tokens)
        gap = None if quick or not torch.cuda.is_available() else _host_gap(llm, prompt, tokens)
    rate = chip.rate(_dtype())
    return {
        "model": f"random Llama, {weights / 1e6:.0f} M weights in matrices, bfloat16",
        "prefill_tokens_per_s": round(prompt / prefill_s, 2),
        "prefill_share_of_matrix_rate": _share(2.0 * weights * prompt / prefill_s / rate),
        "decode_tokens_per_s": round(1 / single_s, 2),
        "decode_share_of_bandwidth": _share(2.0 * weights / single_s / chip.bandwidth),
        "decode_requests": requests,
        "decode_batch_tokens_per_s": round(requests / batch_s, 2),
        "host_gap_us_per_step": gap,
    }


def _share(share: float) -> float:
    """To four digits, however small: an interpreter reaches a millionth."""
    return float(f"{share:.4g}")


def _dtype() -> Any:
    from core.spec import DType

    return DType.BFLOAT16


def _write_model(folder: Path, quick: bool) -> int:
    """A Llama of random weights and a tokenizer; how many elements its matrices have, the head's among them."""
    config = LlamaConfig(
        **(_QUICK if quick else _FULL),
        num_key_value_heads=2 if quick else 8,
        vocab_size=320 if quick else 32768,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    matrices = [p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    return sum(matrices)


def _seconds(llm: LLM, requests: int, prompt: int, tokens: int) -> float:
    prompts: Sequence[list[int]] = [[1 + (row + at) % 250 for at in range(prompt)] for row in range(requests)]
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - begin


def _decode_seconds(llm: LLM, requests: int, prompt: int, tokens: int) -> float:
    """Seconds of a step: what more tokens cost over one."""
    _seconds(llm, requests, prompt, tokens)
    short, long = (min(_seconds(llm, requests, prompt, count) for _ in range(2)) for count in (1, tokens))
    return max(long - short, 1e-9) / (tokens - 1)


def _host_gap(llm: LLM, prompt: int, tokens: int) -> float | None:
    """Microseconds of a decode step in which no kernel runs; None where the profiler sees none."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    busy, wall = [], []
    for count in (1, tokens):
        with torch.profiler.profile(activities=activities) as profile:
            wall.append(_seconds(llm, 1, prompt, count))
        busy.append(sum(event.self_device_time_total for event in profile.key_averages()) * 1e-6)
    if busy[1] <= busy[0]:
        return None
    return round((wall[1] - wall[0] - (busy[1] - busy[0])) / (tokens - 1) * 1e6, 2)
