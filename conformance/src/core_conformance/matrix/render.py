"""The matrix as GitHub Actions takes it, as JSON, and as a table for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from core.errors import ConfigError
from core_conformance.matrix.jobs import Job

__all__ = ["FORMATS", "MOST_JOBS", "as_github", "as_json", "as_markdown", "github_rows"]

MOST_JOBS = 256
"""Jobs that GitHub Actions takes in one matrix."""


def github_rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One entry of `include` for each job and shard.

    Raises:
        ConfigError: there are more than GitHub Actions takes, or a machine has no labels to find it by.
    """
    for job in jobs:
        if not job.runner.labels:
            raise ConfigError(f"runner {job.runner.key!r} has no labels; give it some in runners.toml or by --labels")
    rows = [_row(job, shard) for job in jobs for shard in range(1, job.runner.shards + 1)]
    if len(rows) > MOST_JOBS:
        raise ConfigError(
            f"the matrix has {len(rows)} jobs and GitHub Actions takes {MOST_JOBS}; ask for fewer --shards, or split "
            "it with --backend or --model"
        )
    return rows


def as_github(jobs: Sequence[Job]) -> str:
    """Two lines for `$GITHUB_OUTPUT`: `matrix`, and `has_jobs`, since a job over an empty matrix is an error."""
    rows = github_rows(jobs)
    matrix = json.dumps({"include": rows}, separators=(",", ":"))
    return f"matrix={matrix}\nhas_jobs={'true' if rows else 'false'}"


def as_json(jobs: Sequence[Job]) -> str:
    """`{"jobs": [...]}`, one entry a job."""
    return json.dumps({"jobs": [_facts(job) for job in jobs]}, indent=2)


def as_markdown(jobs: Sequence[Job]) -> str:
    """A table, one line a job."""
    if not jobs:
        return "No job: nothing that one depends on has changed."
    head = "| backend | hardware | model | dtype | quantization | parallelism | level | mode | shards |"
    lines = [head, "|" + "---|" * 9]
    for job in jobs:
        words = (job.runner.backend, job.runner.hardware, *job.key[1:], job.level, job.runner.mode)
        lines.append("| " + " | ".join((*words, str(job.runner.shards))) + " |")
    return "\n".join(lines)


FORMATS: dict[str, Callable[[Sequence[Job]], str]] = {"github": as_github, "json": as_json, "markdown": as_markdown}
"""By the word after `--format`."""


def _facts(job: Job) -> dict[str, Any]:
    runner = job.runner
    return {
        "backend": runner.backend,
        "model": job.model.name,
        "dtype": job.dtype,
        "quantization": job.quantization,
        "parallelism": job.parallelism,
        "architecture": job.model.architecture,
        "hardware": runner.hardware,
        "level": job.level,
        "mode": runner.mode,
        "package": runner.package,
        "labels": list(runner.labels),
        "shards": runner.shards,
        "timeout_minutes": runner.timeout_minutes,
        "slug": job.slug,
    }


def _row(job: Job, shard: int) -> dict[str, Any]:
    facts = _facts(job)
    shards = facts.pop("shards")
    told = [job.runner.backend, job.model.name, *(part for part in job.key[2:] if part not in ("suite", "none", "tp1"))]
    name = " ".join([*told, job.level]) + (f" {shard}/{shards}" if shards > 1 else "")
    return {
        "name": name,
        **facts,
        "shard": f"{shard}/{shards}",
        "artifact": f"{job.slug}--{shard}",
        "arguments": " ".join(job.arguments(shard)),
    }
