"""The committed lists of ids that make up each level: completeness, instead of "0 failures"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from core_conformance.records import level_of

__all__ = ["LEVELS", "levels_up_to", "must_pass", "write_must_pass"]

LEVELS = ("L0", "L1", "L2", "L3")
"""Levels that this suite has, lowest first."""
_FOLDER = Path(__file__).parent / "must_pass"


def levels_up_to(level: str) -> tuple[str, ...]:
    """("L0", "L1") of "L1"."""
    return LEVELS[: LEVELS.index(level) + 1]


def must_pass(levels: Iterable[str]) -> list[str]:
    """Ids of these levels, as committed."""
    found: list[str] = []
    for level in levels:
        path = _FOLDER / f"{level}.txt"
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [line for line in lines if line and not line.startswith("#")]
    return found


def write_must_pass(collected: Sequence[str], levels: Iterable[str]) -> None:
    """Replaces the lists of these levels by what was collected."""
    _FOLDER.mkdir(exist_ok=True)
    for level in levels:
        ids = sorted({check_id for check_id in collected if level_of(check_id) == level})
        head = f"# {level}: every id, exactly once. Written by `core conformance run --write-must-pass`.\n"
        (_FOLDER / f"{level}.txt").write_text(head + "".join(f"{check_id}\n" for check_id in ids), encoding="utf-8")
