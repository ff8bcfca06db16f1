"""What a benchmark found: throughput, and percentiles of TTFT, TPOT, ITL and E2EL in milliseconds."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import ConfigError

__all__ = ["METRICS", "Sample", "parse_goodput", "percentile", "result_file", "show", "summarize"]

METRICS: dict[str, str] = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}
"""Latencies by the names that `--percentile-metrics` takes, with their titles."""


@dataclass(slots=True)
class Sample:
    """One request as the client saw it. Times are `time.perf_counter` seconds.

    Args:
        start: When it was sent.
        times: When each event with text or tokens came.
        end: When the answer was complete.
        error: Why it failed; None where it did not.
    """

    start: float
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.start

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None where there was only one."""
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Seconds between events."""
        return [later - sooner for sooner, later in zip(self.times, self.times[1:], strict=False)]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _values(samples: Sequence[Sample], metric: str) -> list[float]:
    if metric == "itl":
        return [gap for sample in samples for gap in sample.itl]
    found = (getattr(sample, metric) for sample in samples)
    return [value for value in found if value is not None]


def parse_goodput(bounds: Sequence[str]) -> dict[str, float]:
    """Bounds in ms by metric from "ttft:200" and the like.

    Raises:
        ConfigError: a bound is malformed, or its metric is unknown.
    """
    parsed = {}
    for bound in bounds:
        metric, _, limit = bound.partition(":")
        if metric not in METRICS or metric == "itl" or not limit.replace(".", "", 1).isdigit():
            raise ConfigError(f"--goodput must be ttft:MS, tpot:MS or e2el:MS, got {bound!r}")
        parsed[metric] = float(limit)
    return parsed


def _good(sample: Sample, bounds: Mapping[str, float]) -> bool:
    return all((getattr(sample, metric) or 0.0) * 1e3 <= limit for metric, limit in bounds.items())


def summarize(
    samples: Sequence[Sample], seconds: float, metrics: Sequence[str], percents: Sequence[float], goodput: Sequence[str]
) -> dict[str, Any]:
    """The result, with the field names of vLLM's benchmark."""
    good = [sample for sample in samples if sample.error is None]
    bounds = parse_goodput(goodput)
    inputs, outputs = sum(s.input_tokens for s in good), sum(s.output_tokens for s in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "total_cached_tokens": sum(s.cached_tokens for s in good),
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_good(s, bounds) for s in good) / seconds if bounds else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "errors": sorted({s.error for s in samples if s.error is not None})[:10],
    }
    for metric in metrics:
        result.update(_statistics(metric, _values(good, metric), percents))
    return result


def _statistics(metric: str, values: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    millis = [value * 1e3 for value in values]
    found = {
        f"mean_{metric}_ms": statistics.fmean(millis),
        f"median_{metric}_ms": statistics.median(millis),
        f"std_{metric}_ms": statistics.pstdev(millis),
    }
    for percent in percents:
        found[f"p{percent:g}_{metric}_ms"] = percentile(millis, percent)
    return found


def result_file(path: str | None, flag: str = "--output-json") -> Path | None:
    """Where a result goes, None where it is not asked for; looked at before anything is measured.

    Raises:
        ConfigError: no file can be written there.
    """
    if path is None:
        return None
    place = Path(path)
    if place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ConfigError(f"{flag} {path!r} cannot be written; give a file in a folder that is there")
    return place


def show(result: Mapping[str, Any], title: str) -> None:
    """Writes the numbers of a result to standard output, one a line."""
    width = max(len(name) for name in result)
    lines = [title]
    for name, value in result.items():
        if isinstance(value, (int, float)):
            lines.append(
                f"  {name:<{width}}  {value:.2f}" if isinstance(value, float) else f"  {name:<{width}}  {value}"
            )
    lines += [f"  error: {error}" for error in result.get("errors", ())]
    sys.stdout.write("\n".join(lines) + "\n")
