"""Jobs of the matrix: every (backend, model, dtype, quantization, parallelism) that a machine is there for."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from core.errors import ConfigError
from core_conformance.matrix.tables import ModelRow, RunnerRow, Tables
from core_conformance.must_pass_lists import LEVELS

__all__ = ["Job", "Wanted", "expand", "with_wanted"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One key of the matrix on one kind of machine.

    Args:
        runner: The machine and its backend.
        model: The model.
        dtype: Its type; "suite" for the suite's own.
        quantization: Its scheme.
        parallelism: "tp1", "tp2", ...
        level: What it runs up to: the lower one of model and machine.
    """

    runner: RunnerRow
    model: ModelRow
    dtype: str
    quantization: str
    parallelism: str
    level: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """(backend, model, dtype, quantization, parallelism)."""
        return self.runner.backend, self.model.name, self.dtype, self.quantization, self.parallelism

    @property
    def slug(self) -> str:
        """The key and the hardware in letters that a file name may have; unique among the jobs of the tables."""
        words = (self.runner.backend, self.runner.hardware, *self.key[1:])
        return ".".join(re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-") for word in words)

    def arguments(self, shard: int = 1) -> list[str]:
        """What follows `core conformance run`.

        Args:
            shard: Which of the runner's shards, counted from 1.

        Raises:
            ConfigError: the suite cannot run the job.
        """
        if (self.quantization, self.parallelism) != ("none", "tp1"):
            raise ConfigError(
                f"{self.model.name} as {self.quantization} {self.parallelism} can be planned and not be run: the suite "
                "quantizes and divides no checkpoint; take it out of models.toml, or limit the runner"
            )
        words = ["--backend", self.runner.backend, "--level", self.level, "--model", self.model.name]
        words += [] if self.dtype == "suite" else ["--dtype", self.dtype]
        return [*words, "--shard", f"{shard}/{self.runner.shards}"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a caller asks of the tables; empty values take what they say.

    Args:
        backends: Only these.
        models: Only these.
        level: At most this level.
        shards: In place of the runners' own.
        package: In place of the runners' own.
        labels: In place of the runners' own; a backend that no table knows becomes a runner by them.
    """

    backends: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    level: str = ""
    shards: int = 0
    package: str = ""
    labels: tuple[str, ...] = ()


def with_wanted(tables: Tables, wanted: Wanted) -> Tables:
    """The tables cut down to what is wanted, with its values in place.

    Raises:
        ConfigError: a backend or model is in no table, or there are fewer shards than one.
    """
    if wanted.shards < 0:
        raise ConfigError(f"--shards is {wanted.shards}; give 1 or more, or 0 for what runners.toml says")
    runners = [row for row in tables.runners if not wanted.backends or row.backend in wanted.backends]
    for name in wanted.backends:
        if not any(row.backend == name for row in runners):
            runners.append(_unknown_runner(name, wanted, tables))
    models = [row for row in tables.models if not wanted.models or row.name in wanted.models]
    missing = [name for name in wanted.models if not any(row.name == name for row in models)]
    if missing:
        raise ConfigError(f"no row of models.toml is called {missing[0]!r}; there are {_names(tables.models)}")
    changes = {name: getattr(wanted, name) for name in ("shards", "package", "labels") if getattr(wanted, name)}
    runners = [replace(row, level=_lower(row.level, wanted.level), **changes) for row in runners]
    return replace(tables, runners=tuple(runners), models=tuple(models))


def expand(tables: Tables) -> list[Job]:
    """Every job that the tables make, in their order; rows that a runner's limits leave out make none."""
    return [job for runner in tables.runners for model in tables.models for job in _jobs(runner, model)]


def _jobs(runner: RunnerRow, model: ModelRow) -> Iterator[Job]:
    if not _passes(model.name, runner.models):
        return
    for dtype in model.dtypes:
        for quantization in model.quantizations:
            for parallelism in model.parallelism:
                fits = (
                    (dtype == "suite" or _passes(dtype, runner.dtypes))
                    and _passes(quantization, runner.quantizations)
                    and _passes(parallelism, runner.parallelism)
                )
                if fits:
                    yield Job(
                        runner=runner,
                        model=model,
                        dtype=dtype,
                        quantization=quantization,
                        parallelism=parallelism,
                        level=_lower(model.level, runner.level),
                    )


def _passes(value: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)


def _lower(one: str, other: str) -> str:
    """The lower of two levels; an empty one does not count."""
    return min((level for level in (one, other) if level), key=LEVELS.index)


def _unknown_runner(name: str, wanted: Wanted, tables: Tables) -> RunnerRow:
    if not wanted.labels:
        raise ConfigError(
            f"no row of runners.toml has backend {name!r}; there are "
            f"{', '.join(dict.fromkeys(row.backend for row in tables.runners))}: add one to .conformance/runners.toml, "
            "or give --labels"
        )
    # A repository that names its backend on the command line alone is the backend's own: every file concerns it.
    return dataclasses.replace(RunnerRow(backend=name), paths=("*",))


def _names(rows: Sequence[ModelRow]) -> str:
    return ", ".join(row.name for row in rows) or "none"
