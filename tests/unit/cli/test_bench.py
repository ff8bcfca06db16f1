"""`core bench serve`: what is sent, what is measured, what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from core.cli.bench_client import AnswerError, stream_events
from core.cli.bench_data import custom_requests, prefix_requests, random_requests
from core.cli.bench_report import Sample, percentile, show, summarize
from core.cli.bench_serve import ServeBench, _save, measure
from core.errors import ConfigError
from core.serve.prompts import ChatRenderer
from core.serve.server import bind, serve
from core.serve.settings import ServeSettings

OPTIONS: dict[str, Any] = {
    "base_url": "http://127.0.0.1:1",
    "model": None,
    "endpoint": "/v1/completions",
    "dataset_name": "random",
    "dataset_path": None,
    "num_prompts": 4,
    "request_rate": float("inf"),
    "burstiness": 1.0,
    "max_concurrency": 2,
    "random_input_len": 10,
    "random_output_len": 5,
    "random_range_ratio": 0.0,
    "prefix_repetition_prefix_len": 8,
    "prefix_repetition_suffix_len": 4,
    "prefix_repetition_num_prefixes": 2,
    "prefix_repetition_output_len": 3,
    "vocab_size": 900,
    "temperature": 0.0,
    "ignore_eos": True,
    "num_warmups": 1,
    "seed": 0,
    "percentile_metrics": "ttft,tpot,itl,e2el",
    "metric_percentiles": "50,99",
    "goodput": None,
    "save_result": False,
    "result_filename": None,
    "api_key": None,
}


@contextlib.asynccontextmanager
async def served(engine: FakeEngine, **settings: Any) -> AsyncIterator[str]:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    ready, stop = asyncio.Event(), asyncio.Event()

    async def load() -> FakeEngine:
        return engine

    task = asyncio.create_task(
        serve(
            ServeSettings(host="127.0.0.1", port=port, served_model_names=("m",), **settings),
            "m",
            load,
            make_renderer=lambda e: ChatRenderer(e.template),
            on_ready=lambda *_: ready.set(),
            stop=stop,
        )
    )
    await asyncio.wait_for(ready.wait(), 5)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_every_request_is_measured(endpoint: str) -> None:
    engine = FakeEngine(cached_tokens=3, step_s=0.005)
    async with served(engine, api_keys=("K",)) as url:
        bench = ServeBench(**{**OPTIONS, "base_url": url, "endpoint": endpoint, "api_key": "K"})
        samples, seconds = await measure(bench, "m", bench.requests())
    result = summarize(samples, seconds, bench.metrics, bench.percents, ["ttft:60000"])
    assert result["completed"] == 4
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 20
    assert result["total_cached_tokens"] == 12
    assert result["request_goodput"] == result["request_throughput"]
    assert all(len(sample.times) == 5 for sample in samples)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < result[f"median_{metric}_ms"] <= result[f"p99_{metric}_ms"] < 5000
    assert result["mean_itl_ms"] >= 4
    assert len(engine.seen) == 5


async def test_failures_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    async with served(FakeEngine(max_model_len=12)) as url:
        bench = ServeBench(**{**OPTIONS, "base_url": url})
        samples, seconds = await measure(bench, "m", bench.requests())
    result = summarize(samples, seconds, bench.metrics, bench.percents, ())
    assert result["completed"] == 0
    assert result["failed"] == 4
    assert "context window" in result["errors"][0]
    show(result, "title")
    assert "context window" in capsys.readouterr().out


async def test_a_failure_in_the_middle_is_a_failure() -> None:
    async with served(FakeEngine(fails_after=2)) as url:
        bench = ServeBench(**{**OPTIONS, "base_url": url, "num_prompts": 1})
        samples, _ = await measure(bench, "m", bench.requests())
    assert "engine process" in (samples[0].error or "")


async def test_no_server() -> None:
    with pytest.raises(AnswerError, match=r"127\.0\.0\.1:1"):
        async for _ in stream_events("http://127.0.0.1:1/v1/completions", {}, None):
            pass


def test_datasets() -> None:
    plain = random_requests(3, 10, 5, range_ratio=0.5, vocab_size=1000, seed=1)
    assert plain == random_requests(3, 10, 5, range_ratio=0.5, vocab_size=1000, seed=1)
    assert all(5 <= len(request.prompt) <= 15 for request in plain)
    assert all(100 <= token_id < 1000 for request in plain for token_id in request.prompt)
    shared = prefix_requests(6, 8, 4, 2, 3, vocab_size=1000, seed=1)
    assert len({tuple(request.prompt[:8]) for request in shared}) == 2
    assert len({tuple(request.prompt) for request in shared}) == 6


def test_custom_dataset(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a", "output_tokens": 7}\n\n{"prompt": [1, 2]}\n{"prompt": "c"}\n')
    requests = custom_requests(str(file), 2, 9)
    assert [(request.prompt, request.output_len) for request in requests] == [("a", 7), ([1, 2], 9)]
    for content in ("nope", "{}", '{"prompt": 5}', "[]", ""):
        file.write_text(content)
        with pytest.raises(ConfigError):
            custom_requests(str(file), 2, 9)


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0], 100) == 2.0


def test_times_of_a_sample() -> None:
    sample = Sample(10.0, [10.5, 10.6, 10.8], 11.0, output_tokens=3)
    assert sample.ttft == pytest.approx(0.5)
    assert sample.tpot == pytest.approx(0.15)
    assert sample.itl == pytest.approx([0.1, 0.2])
    assert sample.e2el == pytest.approx(1.0)
    assert Sample(0.0, [1.0], 1.0, output_tokens=1).tpot is None


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"request_rate": 0}, "--request-rate"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio"),
        ({"dataset_name": "custom"}, "--dataset-path"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"goodput": ["itl:5"]}, "--goodput"),
        ({"percentile_metrics": "ttft,x"}, "--percentile-metrics"),
        ({"metric_percentiles": "101"}, "--metric-percentiles"),
        ({"metric_percentiles": "x"}, "--metric-percentiles"),
    ],
)
def test_wrong_options(change: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ServeBench(**{**OPTIONS, **change})


def test_results_are_saved_without_the_key(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    bench = ServeBench(**{**OPTIONS, "result_filename": str(file), "api_key": "SECRET"})
    _save(bench, "m", {"completed": 1})
    text = file.read_text()
    assert "SECRET" not in text
    assert json.loads(text)["options"]["request_rate"] == "inf"


async def test_the_rate_spreads_arrivals() -> None:
    engine = FakeEngine()
    async with served(engine) as url:
        bench = ServeBench(**{**OPTIONS, "base_url": url, "request_rate": 50.0, "num_warmups": 0})
        samples, _ = await measure(bench, "m", bench.requests())
    starts = sorted(sample.start for sample in samples)
    assert starts[-1] - starts[0] > 0.005
    assert httpx.URL(url).host == "127.0.0.1"
