"""Parts of a run: the ids of one shard, and the ids that belong to one model's key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.errors import ConfigError, ModelNotFoundError
from core.loader.hub import resolve_model
from core_conformance.must_pass_lists import must_pass
from core_conformance.records import level_of

__all__ = ["ALWAYS", "WITNESS", "Part", "Shard", "choose", "parse_shard", "scope_of"]

ALWAYS = "L0"
"""The level that every shard runs whole: its outcomes say that the shards had the same backend under test."""
WITNESS = "copy"
"""The suite's own witness of scheduling: its ids belong to every model's key."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several runs that make one report together.

    Args:
        index: Which, from 1.
        count: Of how many.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def ids(self, everything: Iterable[str]) -> frozenset[str]:
        """Ids of this shard: all of L0, and every `count`-th other one in the order of their names.

        They follow from the ids alone, so that each machine finds the same ones; neighbours, which cost about the same,
        go to different shards.
        """
        ids = sorted(set(everything))
        others = [check_id for check_id in ids if level_of(check_id) != ALWAYS]
        return frozenset(ids).difference(others).union(others[self.index - 1 :: self.count])


def parse_shard(text: str) -> Shard:
    """The shard meant by "2/3".

    Raises:
        ConfigError: the text is no such pair.
    """
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"--shard is {text!r}; write INDEX/COUNT with an index from 1 to COUNT, such as 2/3")
    return Shard(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a part of a run leaves out, and what it runs besides.

    Args:
        skip: Ids that it does not run.
        others: Those of them that belong to another model's key, and not into its report.
        models: Names of the models asked for; empty for all of the suite's.
        checkpoints: (folder, dtype) of models that are not the suite's.
    """

    skip: frozenset[str]
    others: frozenset[str]
    models: tuple[str, ...]
    checkpoints: tuple[tuple[str, str], ...]


def choose(backend: str, levels: Sequence[str], *, shard: str, models: Sequence[str], dtype: str) -> Part:
    """The part of a run that a shard and models make, with the cases of the backend's own package.

    Args:
        backend: NAME or NAME:INDEX.
        levels: Levels of the run.
        shard: "2/3"; empty for everything.
        models: Names of the suite's models, and folders or names of checkpoints; empty for all of the suite's.
        dtype: In which checkpoints run.

    Raises:
        ConfigError: the shard is none, or a model is neither the suite's nor on disk.
    """
    from core.plugins import list_conformance_cases
    from core_conformance.matrix import read_tables

    known = [row.name for row in read_tables().models]
    checkpoints = {name: _folder(name, known) for name in models if name not in known}
    in_scope = scope_of([name for name in models if name in known] if models else known, known)
    listed = must_pass(levels)
    others = frozenset(check_id for check_id in listed if not in_scope(check_id))
    skip, further = others, [str(folder) for folder in checkpoints.values()]
    if shard:
        ids = [*listed, *(case.id for case in list_conformance_cases(backend.partition(":")[0]))]
        ids += _checkpoint_ids(further, dtype, levels)
        skip = frozenset(ids) - parse_shard(shard).ids(check_id for check_id in ids if check_id not in others)
    return Part(
        skip=skip,
        others=others,
        models=tuple(checkpoints[name].resolve().name if name in checkpoints else name for name in models),
        checkpoints=tuple((folder, dtype) for folder in further),
    )


def scope_of(models: Iterable[str], known: Iterable[str]) -> Callable[[str], bool]:
    """Whether an id belongs to the keys of these models: not where it names another one; the copy model's always do.

    Args:
        models: Names of the suite's models.
        known: Every model of the suite.
    """
    left_out = frozenset(known) - {WITNESS, *models}
    return lambda check_id: level_of(check_id) < "L2" or left_out.isdisjoint(re.split(r"[/-]", check_id))


def _folder(name: str, known: Sequence[str]) -> Path:
    """The folder of a checkpoint."""
    try:
        folder = resolve_model(name)
    except ModelNotFoundError as error:
        raise ConfigError(
            f"--model {name!r} is neither one of the suite's models ({', '.join(known)}) nor a checkpoint: {error}"
        ) from error
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model {name!r} is no folder with a config.json, which transformers needs too; give one")
    return folder


def _checkpoint_ids(folders: Sequence[str], dtype: str, levels: Sequence[str]) -> list[str]:
    if not folders:
        return []
    # Imports torch and transformers, which a run needs anyway and a look at the ids does not.
    from core_conformance.engines.checkpoint import Checkpoint, checkpoint_ids

    return [i for folder in folders for i in checkpoint_ids(Checkpoint(folder=Path(folder), dtype=dtype), levels)]
