"""The committed lists of ids that make up each level: completeness, instead of "0 failures"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from core_conformance.records import level_of

__all__ = ["LEVELS", "levels_up_to", "mandatory", "must_pass", "write_must_pass"]

LEVELS = ("L0", "L1", "L2", "L3", "L4")
"""Levels that this suite has, lowest first."""
_FOLDER = Path(__file__).parent / "must_pass"


def levels_up_to(level: str) -> tuple[str, ...]:
    """("L0", "L1") of "L1"."""
    return LEVELS[: LEVELS.index(level) + 1]


def must_pass(levels: Iterable[str]) -> list[str]:
    """Ids of these levels, as committed."""
    return [check_id for level in levels for check_id in _read(level)]


def mandatory(levels: Iterable[str]) -> list[str]:
    """Those of them that no backend may decline."""
    wanted = frozenset(levels)
    return [check_id for check_id in _read("mandatory") if level_of(check_id) in wanted]


def write_must_pass(collected: Sequence[str], declared: Sequence[str], levels: Iterable[str]) -> None:
    """Replaces the lists of these levels by what was collected and is declared mandatory."""
    _FOLDER.mkdir(exist_ok=True)
    wanted = tuple(levels)
    kept = [check_id for check_id in _read("mandatory") if level_of(check_id) not in wanted]
    for level in wanted:
        _write(level, f"{level}: every id, exactly once.", [i for i in collected if level_of(i) == level])
    _write("mandatory", "Ids that no backend may decline.", [*kept, *declared])


def _read(name: str) -> list[str]:
    path = _FOLDER / f"{name}.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def _write(name: str, head: str, ids: Iterable[str]) -> None:
    text = f"# {head} Written by `core conformance run --write-must-pass`.\n"
    (_FOLDER / f"{name}.txt").write_text(text + "".join(f"{i}\n" for i in sorted(set(ids))), encoding="utf-8")
