"""GET /metrics: vLLM's names and labels, so that existing dashboards and inference gateways read them.

Values are kept as plain numbers and rendered on a scrape; a token costs one bisection.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from core.outputs import CompletionOutput, EngineStats, FinishReason, RequestOutput
from core.sampling_params import SamplingParams

__all__ = ["CONTENT_TYPE", "Histogram", "RequestRecord", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of the exposition that `ServerMetrics.render` gives."""

# fmt: off
_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
_LENGTHS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (0.0, *_COUNTS)


class Histogram:
    """Cumulative counts over fixed upper bounds, in the unit of the metric's name."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts `value` once."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations at or below it), ending with +Inf."""
        total = 0
        rows: list[tuple[str, float]] = []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), total))
        return rows


_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Seconds from arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Seconds between outputs of one choice, for each token.", _TOKEN),
    "request_time_per_output_token_seconds": ("Mean seconds a token after the first one.", _TOKEN),
    "e2e_request_latency_seconds": ("Seconds from arrival to the last token.", _REQUEST),
    "request_queue_time_seconds": ("Seconds from arrival to the first schedule.", _REQUEST),
    "request_prefill_time_seconds": ("Seconds from the first schedule to the first token.", _REQUEST),
    "request_decode_time_seconds": ("Seconds from the first to the last token.", _REQUEST),
    "request_inference_time_seconds": ("Seconds from the first schedule to the last token.", _REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a request.", _LENGTHS),
    "request_generation_tokens": ("Tokens that a request generated, all choices.", _LENGTHS),
    "request_params_n": ("Choices asked for.", _COUNTS),
    "request_params_max_tokens": ("max_tokens asked for, where given.", _LENGTHS),
    "request_num_preemptions": ("Preemptions of a request.", _PREEMPTIONS),
}

_COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of requests that gave a first output.",
    "prompt_tokens_cached": "Those of them that the prefix cache held.",
    "generation_tokens": "Tokens generated.",
}


class RequestRecord:
    """Times and counts of one request (all its choices); feeds the histograms."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "_params", "_reason", "_tokens")

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._arrival = time.perf_counter()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._tokens = 0
        self._reason = FinishReason.ABORT

    def output(self, output: RequestOutput) -> None:
        """Counts one output of the engine."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.counters["prompt_tokens"] += len(output.prompt_token_ids)
            self._metrics.counters["prompt_tokens_cached"] += max(output.num_cached_tokens, 0)
        for choice in output.outputs:
            self._choice(choice, now)

    def _choice(self, choice: CompletionOutput, now: float) -> None:
        count = len(choice.token_ids)
        if count:
            last = self._last.get(choice.index)
            if last is not None:
                self._metrics.histograms["inter_token_latency_seconds"].observe((now - last) / count)
            elif not self._last:
                self._metrics.histograms["time_to_first_token_seconds"].observe(now - self._arrival)
            self._last[choice.index] = now
            self._tokens += count
            self._metrics.counters["generation_tokens"] += count
        if choice.finish_reason is not None:
            self._reason = choice.finish_reason

    def finish(self, last: RequestOutput | None, *, failed: bool = False) -> None:
        """Counts the request once: under its last finish reason, or as aborted where `last` is not its end.

        Args:
            last: Its newest output.
            failed: The engine ended under it: an error, and no client that left.
        """
        finished = last is not None and last.finished
        unfinished = FinishReason.ERROR if failed else FinishReason.ABORT
        reason = self._reason if finished else unfinished
        self._metrics.request_success[str(reason)] += 1
        if last is None or not finished:
            return
        observe = self._metrics.observe
        observe("e2e_request_latency_seconds", time.perf_counter() - self._arrival)
        observe("request_prompt_tokens", len(last.prompt_token_ids))
        observe("request_generation_tokens", self._tokens)
        observe("request_params_n", self._params.n)
        if self._params.max_tokens is not None:
            observe("request_params_max_tokens", self._params.max_tokens)
        self._observe_times(last)

    def _observe_times(self, last: RequestOutput) -> None:
        times = last.metrics
        if times is None:
            return
        self._metrics.observe("request_num_preemptions", times.num_preemptions)
        spans = {
            "request_queue_time_seconds": (times.arrival_time, times.scheduled_time),
            "request_prefill_time_seconds": (times.scheduled_time, times.first_token_time),
            "request_decode_time_seconds": (times.first_token_time, times.last_token_time),
            "request_inference_time_seconds": (times.scheduled_time, times.last_token_time),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                self._metrics.observe(name, max(end - start, 0.0))
        per_choice = self._tokens / self._params.n
        if times.first_token_time is not None and times.last_token_time is not None and per_choice > 1:
            span = max(times.last_token_time - times.first_token_time, 0.0)
            self._metrics.observe("request_time_per_output_token_seconds", span / (per_choice - 1))


class ServerMetrics(Collector):
    """All that /metrics shows.

    Args:
        model_name: Value of the `model_name` label.
        stats: Gives the engine's last gauges; None while there is no engine.
        cache_config: Labels of `cache_config_info`, asked at each scrape.
    """

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats | None],
        cache_config: Callable[[], dict[str, str]] = dict,
    ) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.request_success = dict.fromkeys((str(reason) for reason in FinishReason), 0)
        self.admission_rejections: dict[str, int] = {"queue_full": 0}
        self._labels = {"model_name": model_name, "engine": "0"}
        self._stats = stats
        self._cache_config = cache_config
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def observe(self, name: str, value: float) -> None:
        """Counts `value` in the histogram `name`."""
        self.histograms[name].observe(value)

    def render(self) -> bytes:
        """The Prometheus text exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Every metric, freshly made; called by prometheus_client on a scrape."""
        stats = self._stats()
        if stats is not None:
            yield from self._engine_metrics(stats)
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, self.counters[name])
        yield self._labelled("request_success", "Finished requests.", "finished_reason", self.request_success)
        text = "Requests refused before they were queued."
        yield self._labelled("admission_rejections", text, "reason", self.admission_rejections)
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            histogram = self.histograms[name]
            family.add_metric(list(self._labels.values()), histogram.buckets(), sum_value=histogram.sum)
            yield family

    def _engine_metrics(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_requests_running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be scheduled.", stats.num_requests_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is full.", stats.kv_cache_usage)
        yield self._counter("num_preemptions", "Preemptions of running requests.", stats.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_cache_hits)
        info = {**self._cache_config(), "num_gpu_blocks": str(stats.num_blocks), "engine": "0"}
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the KV cache.", labels=list(info))
        family.add_metric(list(info.values()), 1)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family
