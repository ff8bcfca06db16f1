"""`models.toml` and `runners.toml`: what the package brings, changed and extended by the files of a repository."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from core.errors import ConfigError
from core_conformance.must_pass_lists import LEVELS

__all__ = ["OVERRIDES", "ModelRow", "RunnerRow", "Tables", "read_tables"]

OVERRIDES = ".conformance"
"""Folder at the root of a repository that may hold `models.toml` and `runners.toml` of its own."""
MODES = ("VALIDATED", "SIMULATED", "COMPILED")
"""What the records of a runner may be worth."""
_PACKAGED = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model of the matrix and the forms in which it is to be shown.

    Args:
        name: One of the suite's own models, or a name or folder of a checkpoint.
        architecture: As in config.json.
        dtypes: Types; "suite" stands for those that the suite itself takes.
        quantizations: Schemes; "none" for dense weights.
        parallelism: "tp1", "tp2", ...
        level: Highest level.
        paths: Patterns of files that concern its jobs alone; a `*` also matches `/`.
    """

    name: str
    architecture: str = ""
    dtypes: tuple[str, ...] = ("suite",)
    quantizations: tuple[str, ...] = ("none",)
    parallelism: tuple[str, ...] = ("tp1",)
    level: str = "L3"
    paths: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """By what a row of another file changes this one."""
        return self.name


@dataclass(frozen=True, kw_only=True)
class RunnerRow:
    """A kind of machine, the backend that it is there for, and what it can do.

    Args:
        backend: The word after `--backend`.
        hardware: What the machine has, for people.
        package: What to install: a folder or a requirement; empty where the core brings the backend.
        labels: The runner's labels.
        mode: What its records are worth.
        level: Highest level that it can run.
        shards: Jobs over which each row is spread.
        timeout_minutes: For one job.
        models: Patterns of the models that fit on it.
        dtypes: Patterns of the types that it has; "suite" always passes.
        quantizations: Patterns of the schemes that it has.
        parallelism: Patterns of the parallel layouts that it can hold.
        paths: Patterns of files that concern this backend's jobs alone; a `*` also matches `/`.
    """

    backend: str
    hardware: str = "host"
    package: str = ""
    labels: tuple[str, ...] = ()
    mode: str = "VALIDATED"
    level: str = "L3"
    shards: int = 1
    timeout_minutes: int = 60
    models: tuple[str, ...] = ("*",)
    dtypes: tuple[str, ...] = ("*",)
    quantizations: tuple[str, ...] = ("*",)
    parallelism: tuple[str, ...] = ("tp1",)
    paths: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """By what a row of another file changes this one."""
        return f"{self.backend} {self.hardware}"


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Both tables, and the patterns of files on which no job depends."""

    models: tuple[ModelRow, ...]
    runners: tuple[RunnerRow, ...]
    ignore: tuple[str, ...] = ()


_Row = TypeVar("_Row", ModelRow, RunnerRow)


def read_tables(repository: Path | None = None) -> Tables:
    """The package's tables under those of a repository.

    A row with the key of an earlier one changes the fields that it gives; `enabled = false` takes the row out.

    Args:
        repository: Its root; None reads the package's alone.

    Raises:
        ConfigError: a file cannot be read, or a row has an unknown field or a value that makes no sense.
    """
    folders = [_PACKAGED, *([repository / OVERRIDES] if repository else [])]
    model_files = [_read(folder / "models.toml") for folder in folders]
    runner_files = [_read(folder / "runners.toml") for folder in folders]
    return Tables(
        models=tuple(_merge(ModelRow, "model", model_files)),
        runners=tuple(_merge(RunnerRow, "runner", runner_files)),
        ignore=tuple(
            pattern for _, raw in (*model_files, *runner_files) for pattern in raw.get("changes", {}).get("ignore", ())
        ),
    )


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    if not path.is_file():
        return path, {}
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML ({error}); correct it") from error


def _merge(kind: type[_Row], word: str, files: Sequence[tuple[Path, dict[str, Any]]]) -> list[_Row]:
    rows: dict[str, _Row] = {}
    for path, raw in files:
        for table in raw.get(word, ()):
            place = f"{path}, [[{word}]]"
            enabled, fields = _fields(kind, table, place)
            new = _made(kind, fields, place)
            old = rows.get(new.key)
            if not enabled:
                rows.pop(new.key, None)
                continue
            rows[new.key] = _checked(new if old is None else dataclasses.replace(old, **fields), place)
    return list(rows.values())


def _fields(kind: type[_Row], table: Mapping[str, Any], place: str) -> tuple[bool, dict[str, Any]]:
    known = {field.name: field for field in dataclasses.fields(kind)}
    given = dict(table)
    enabled = given.pop("enabled", True)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{place}: unknown field {name!r}; known are enabled, {', '.join(known)}")
        wanted = str(known[name].type)
        if not _FITS[wanted](value):
            raise ConfigError(f"{place}: {name} is {value!r}; write {_TOLD[wanted]}")
        if isinstance(value, list):
            given[name] = tuple(value)
    return bool(enabled), given


def _made(kind: type[_Row], fields: dict[str, Any], place: str) -> _Row:
    try:
        return kind(**fields)
    except TypeError as error:
        raise ConfigError(f"{place}: {error}; give every row its name") from error


def _checked(row: _Row, place: str) -> _Row:
    if row.level not in LEVELS:
        raise ConfigError(f"{place} {row.key}: level is {row.level!r}; write one of {', '.join(LEVELS)}")
    if isinstance(row, RunnerRow):
        if row.mode not in MODES:
            raise ConfigError(f"{place} {row.key}: mode is {row.mode!r}; write one of {', '.join(MODES)}")
        if row.shards < 1 or row.timeout_minutes < 1:
            raise ConfigError(
                f"{place} {row.key}: shards is {row.shards}, timeout_minutes {row.timeout_minutes}; "
                "both must be 1 or more"
            )
    return row


_FITS: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}
_TOLD = {"str": 'text ("...")', "int": "a whole number", "tuple[str, ...]": 'a list of texts (["...", "..."])'}
