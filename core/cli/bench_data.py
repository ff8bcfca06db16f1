"""What a benchmark sends: random prompts, prompts with shared prefixes, or a file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import ConfigError

__all__ = ["BenchRequest", "custom_requests", "prefix_requests", "random_requests"]

LOWEST_ID = 100
"""Random ids are at or above it: low ids are special tokens in most vocabularies."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: its prompt, as ids or text, and how many tokens to generate."""

    prompt: list[int] | str
    output_len: int


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    low = min(LOWEST_ID, vocab_size // 2)
    return [rng.randrange(low, vocab_size) for _ in range(count)]


def _varied(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, round(length * rng.uniform(1 - ratio, 1 + ratio)))


def random_requests(
    count: int, input_len: int, output_len: int, *, range_ratio: float, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Prompts of random ids that share nothing; lengths vary by `range_ratio` around the given ones."""
    rng = random.Random(seed)
    return [
        BenchRequest(_ids(rng, _varied(rng, input_len, range_ratio), vocab_size), _varied(rng, output_len, range_ratio))
        for _ in range(count)
    ]


def prefix_requests(
    count: int, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int, *, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Prompts that begin with one of `num_prefixes` shared prefixes, in random order."""
    rng = random.Random(seed)
    prefixes = [_ids(rng, prefix_len, vocab_size) for _ in range(num_prefixes)]
    requests = [
        BenchRequest(prefixes[i % num_prefixes] + _ids(rng, suffix_len, vocab_size), output_len) for i in range(count)
    ]
    rng.shuffle(requests)
    return requests


def custom_requests(path: str, count: int, default_output_len: int) -> list[BenchRequest]:
    """The first `count` lines of a JSON-lines file with `prompt` and optionally `output_tokens`.

    Raises:
        ConfigError: the file cannot be read, or a line has no prompt.
    """
    requests: list[BenchRequest] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and len(requests) < count:
                    requests.append(_custom(line, f"{path} line {number}", default_output_len))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path!r} cannot be read: {error}; check the path") from None
    if not requests:
        raise ConfigError(f"--dataset-path {path!r} holds no request; write a line of JSON with a prompt")
    return requests


def _custom(line: str, where: str, default_output_len: int) -> BenchRequest:
    try:
        raw: Any = json.loads(line)
        prompt, output_len = raw["prompt"], raw.get("output_tokens", default_output_len)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{where} must be an object with a prompt") from None
    if not isinstance(prompt, str) and not _is_ids(prompt):
        raise ConfigError(f"{where}: prompt must be a string or a list of token ids")
    return BenchRequest(prompt, int(output_len))


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(type(token_id) is int for token_id in prompt)
