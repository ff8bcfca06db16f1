"""`core bench serve`: load for a running server."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.cli.bench_client import AnswerError, stream_events
from core.cli.bench_data import BenchRequest, custom_requests, prefix_requests, random_requests
from core.cli.bench_report import METRICS, Sample, parse_goodput, result_file, show, summarize
from core.cli.progress import progress_bar
from core.errors import ConfigError, CoreError

__all__ = ["ServeBench", "measure", "run_serve_bench"]


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """Options of `core bench serve`; named as its flags.

    Raises:
        ConfigError: on construction, naming flag and value.
    """

    base_url: str
    model: str | None
    endpoint: str
    dataset_name: str
    dataset_path: str | None
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    random_input_len: int
    random_output_len: int
    random_range_ratio: float
    prefix_repetition_prefix_len: int
    prefix_repetition_suffix_len: int
    prefix_repetition_num_prefixes: int
    prefix_repetition_output_len: int
    vocab_size: int
    temperature: float
    ignore_eos: bool
    num_warmups: int
    seed: int
    percentile_metrics: str
    metric_percentiles: str
    goodput: list[str] | None
    save_result: bool
    result_filename: str | None
    api_key: str | None

    def __post_init__(self) -> None:
        positive = ("num_prompts", "random_input_len", "random_output_len", "prefix_repetition_num_prefixes")
        for name in (*positive, "vocab_size", "burstiness", "request_rate"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"--random-range-ratio must be in [0, 1), got {self.random_range_ratio}")
        if self.dataset_name == "custom" and self.dataset_path is None:
            raise ConfigError("--dataset-name custom needs --dataset-path; give a file of JSON lines")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        parse_goodput(self.goodput or ())
        result_file(self.result_filename, "--result-filename")
        _ = self.metrics, self.percents

    @property
    def metrics(self) -> list[str]:
        """Metrics to report."""
        names = [name.strip() for name in self.percentile_metrics.split(",")]
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics holds {name!r}; use {', '.join(METRICS)}")
        return names

    @property
    def percents(self) -> list[float]:
        """Percentiles to report."""
        try:
            percents = [float(text) for text in self.metric_percentiles.split(",")]
        except ValueError:
            percents = [-1.0]
        if not all(0 <= percent <= 100 for percent in percents):
            raise ConfigError(f"--metric-percentiles must be numbers in [0, 100], got {self.metric_percentiles!r}")
        return percents

    def requests(self) -> list[BenchRequest]:
        """What to send, by the dataset."""
        if self.dataset_name == "custom":
            assert self.dataset_path is not None
            return custom_requests(self.dataset_path, self.num_prompts, self.random_output_len)
        if self.dataset_name == "prefix_repetition":
            return prefix_requests(
                self.num_prompts,
                self.prefix_repetition_prefix_len,
                self.prefix_repetition_suffix_len,
                self.prefix_repetition_num_prefixes,
                self.prefix_repetition_output_len,
                vocab_size=self.vocab_size,
                seed=self.seed,
            )
        return random_requests(
            self.num_prompts,
            self.random_input_len,
            self.random_output_len,
            range_ratio=self.random_range_ratio,
            vocab_size=self.vocab_size,
            seed=self.seed,
        )


def run_serve_bench(bench: ServeBench) -> None:
    """Measures, shows, and where asked for saves.

    Raises:
        CoreError: the server cannot be reached, or every request failed.
    """
    model = bench.model or _served_model(bench)
    requests = bench.requests()
    samples, seconds = asyncio.run(measure(bench, model, requests))
    result = summarize(samples, seconds, bench.metrics, bench.percents, bench.goodput or ())
    show(result, f"{model} at {bench.base_url}{bench.endpoint}, {bench.dataset_name}")
    if bench.save_result:
        _save(bench, model, result)
    if not result["completed"]:
        raise CoreError(f"all {len(samples)} requests failed: {result['errors'][0]}")


def _served_model(bench: ServeBench) -> str:
    url = f"{bench.base_url.rstrip('/')}/v1/models"
    headers = {"Authorization": f"Bearer {bench.api_key}"} if bench.api_key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CoreError(f"{url} gives no model ({error}); start the server, or give --base-url and --model") from None


async def measure(bench: ServeBench, model: str, requests: Sequence[BenchRequest]) -> tuple[list[Sample], float]:
    """Sends warm-up requests, then all of `requests` at their times: (samples, seconds from first to last)."""
    for request in list(requests)[: bench.num_warmups]:
        await _one(bench, model, BenchRequest(request.prompt, min(request.output_len, 8)))
    rng = random.Random(bench.seed + 1)
    places = asyncio.Semaphore(bench.max_concurrency or len(requests))
    begin = time.perf_counter()
    with progress_bar("requests", len(requests)) as advance:

        async def placed(request: BenchRequest) -> Sample:
            async with places:
                sample = await _one(bench, model, request)
            advance()
            return sample

        tasks = []
        for request in requests:
            tasks.append(asyncio.ensure_future(placed(request)))
            await _pause(bench, rng)
        samples = await asyncio.gather(*tasks)
    return samples, time.perf_counter() - begin


async def _pause(bench: ServeBench, rng: random.Random) -> None:
    """Waits until the next arrival: gaps are gamma-distributed with shape `burstiness`, exponential at 1."""
    if bench.request_rate != float("inf"):
        await asyncio.sleep(rng.gammavariate(bench.burstiness, 1 / (bench.request_rate * bench.burstiness)))


async def _one(bench: ServeBench, model: str, request: BenchRequest) -> Sample:
    sample = Sample(time.perf_counter())
    url = bench.base_url.rstrip("/") + bench.endpoint
    try:
        async with contextlib.aclosing(stream_events(url, _body(bench, model, request), bench.api_key)) as events:  # type: ignore[type-var]
            async for at, event in events:
                _take(sample, at, event)
    except AnswerError as error:
        sample.error = str(error)
    sample.end = time.perf_counter()
    if sample.error is None and not sample.times:
        sample.error = "the answer held no token"
    return sample


def _take(sample: Sample, at: float, event: dict[str, Any]) -> None:
    if event.get("error"):
        raise AnswerError(str(event["error"].get("message"))[:500])
    usage = event.get("usage")
    if usage:
        sample.input_tokens = usage["prompt_tokens"]
        sample.output_tokens = usage["completion_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or ():
        # A chat stream begins with a chunk that only names the role.
        if "role" not in choice.get("delta", {}) and (choice.get("text") is not None or "delta" in choice):
            sample.times.append(at)


def _body(bench: ServeBench, model: str, request: BenchRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_len,
        "temperature": bench.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if bench.ignore_eos:
        body["ignore_eos"] = True
    if bench.endpoint == "/v1/completions":
        return {**body, "prompt": request.prompt}
    text = request.prompt if isinstance(request.prompt, str) else " ".join(map(str, request.prompt))
    return {**body, "messages": [{"role": "user", "content": text}]}


def _save(bench: ServeBench, model: str, result: dict[str, Any]) -> None:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = Path(bench.result_filename or f"bench-{model.replace('/', '_')}-{now}.json")
    options = {key: value for key, value in asdict(bench).items() if key != "api_key"}
    options["request_rate"] = str(bench.request_rate)
    path.write_text(json.dumps({"date": now, "model_id": model, "options": options, **result}, indent=1) + "\n")
