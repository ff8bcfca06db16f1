"""What /metrics says, and that it says it in vLLM's words."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, says
from prometheus_client.parser import text_string_to_metric_families

from core.serve.metrics import Histogram

LABELS = {"model_name": "m", "engine": "0"}


async def scrape(client: httpx.AsyncClient) -> dict[str, float]:
    reply = await client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            extra = {k: v for k, v in sample.labels.items() if k not in LABELS}
            samples[sample.name + "".join(f" {k}={v}" for k, v in sorted(extra.items()))] = sample.value
    return samples


async def test_a_request_is_counted_everywhere_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.reply = says("Hello")
    engine.cached_tokens = 2
    await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 10})
    found = await scrape(client)
    assert found["vllm:prompt_tokens_total"] == 3
    assert found["vllm:prompt_tokens_cached_total"] == 2
    assert found["vllm:generation_tokens_total"] == 6
    assert found["vllm:request_success_total finished_reason=stop"] == 1
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "request_num_preemptions",
    ):
        assert found[f"vllm:{name}_count"] == 1, name
    assert found["vllm:inter_token_latency_seconds_count"] == 5
    assert found["vllm:request_prompt_tokens_sum"] == 3


async def test_each_prompt_of_a_list_is_a_request(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 2})
    assert (await scrape(client))["vllm:request_success_total finished_reason=length"] == 2


async def test_gauges_come_from_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.running, engine.waiting = 3, 4
    found = await scrape(client)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 4
    assert found["vllm:kv_cache_usage_perc"] == 0
    assert found["vllm:cache_config_info block_size=16 num_gpu_blocks=64"] == 1


async def test_requests_that_the_engine_lost_are_errors_and_no_aborts(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.fails_after = 2
    await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 5})
    found = await scrape(client)
    assert found["vllm:request_success_total finished_reason=error"] == 1
    assert found["vllm:request_success_total finished_reason=abort"] == 0


async def test_refused_requests_are_no_success(client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"prompt": [5000]})
    found = await scrape(client)
    assert sum(value for name, value in found.items() if name.startswith("vllm:request_success_total")) == 0


def test_histogram_buckets_are_cumulative_and_bounds_belong_to_their_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert histogram.sum == pytest.approx(14.0)


async def test_every_metric_is_documented(client: httpx.AsyncClient) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in text, name
