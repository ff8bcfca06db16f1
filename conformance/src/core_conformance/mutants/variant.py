"""What is planted over the reference: a bug that a level must find, or an honest difference that it must let pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from core import plugins
from core.backend import Backend
from core.backend.ops import Determinism
from core_conformance.bare import INFO
from core_conformance.mutants.backend import Maker, MutantBackend
from core_conformance.served.options import ServedOptions
from core_conformance.target import Target, load_target

__all__ = ["Honest", "Mutant", "Variant", "engine_bug", "kernel_bug"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The reference backend with something changed.

    Args:
        name: A few words.
        makers: Operations that it does itself.
        determinism: Class that these operations declare.
        backend: The whole backend, in place of the reference with `makers`; importable from its module, since some
            checks start processes.
        bug: Context in which the core itself is wrong.
        served: Command of a server with a bug, in place of `python -m core.cli`; it is run over the installed backend
            that `core serve` chooses by itself.
    """

    name: str
    makers: Mapping[str, Maker] = field(default_factory=dict)
    determinism: Determinism = Determinism.D1
    backend: type[Backend] | None = None
    bug: Callable[[], AbstractContextManager[Any]] = nullcontext
    served: tuple[str, ...] = ()

    def target(self) -> Target:
        """The backend as the suite takes it."""
        if self.served:
            listing, _ = plugins.choose_device("auto")
            return dataclasses.replace(load_target(listing.name), served=ServedOptions(command=self.served))
        made = self.backend
        if made is None:
            return Target(
                info=INFO, make=lambda: MutantBackend(self.makers, self.determinism), package="core-conformance"
            )
        info = dataclasses.replace(getattr(made, "info", INFO), load=f"{made.__module__}:{made.__qualname__}")
        return Target(info=info, make=made, package="core-conformance")


@dataclass(frozen=True, kw_only=True)
class Mutant(Variant):
    """One bug.

    Args:
        level: Level that must kill it.
        first: Head of the ids of which one must kill it.
        also: Heads of further ids that the kill matrix runs. A mutant with `makers` or a `backend` runs every id of its
            level that can see it anyway.
    """

    level: str
    first: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Honest(Variant):
    """Something that differs and is right.

    Args:
        heads: Heads of the ids that must pass; those at L1 that do none of its `makers` are the reference's own.
    """

    heads: tuple[str, ...]


def kernel_bug(name: str, first: str, makers: Mapping[str, Maker]) -> Mutant:
    """A mutant of L1: kernels with one bug; `first` without the level."""
    return Mutant(name=name, level="L1", first=f"L1/{first}", makers=makers)


def engine_bug(
    name: str, first: str, bug: Callable[[], AbstractContextManager[Any]], *also: str, level: str = "L3"
) -> Mutant:
    """A mutant of the core itself; `first` and `also` without the level."""
    return Mutant(
        name=name, level=level, first=f"{level}/{first}", bug=bug, also=tuple(f"{level}/{head}" for head in also)
    )
