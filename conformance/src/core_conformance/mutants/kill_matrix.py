"""docs/kill-matrix.md: which checks kill which mutants, and what no mutant dies of."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core_conformance.checks import MARK
from core_conformance.mutants.proof import Proof
from core_conformance.run import SUITE

__all__ = ["Row", "check_names", "check_of", "read_rows", "render"]

_HEAD = """# Kill matrix

The suite's own proof: every mutant is the reference, or the core, with one bug; every honest variant is the reference
done in another way that is right too. [conformance.md](conformance.md) says more. This page is made by

    python -m core_conformance.mutants --matrix docs/kill-matrix.md

which runs each mutant against the ids of its level that can see its bug, and fails where one survives those that it is
assigned to, or where an honest variant is rejected. An id that fails because something raised kills nothing.
"""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the page on one variant.

    Args:
        name: Of the variant.
        honest: Whether it must pass.
        level: Of a mutant.
        holds: Whether it ended as it must.
    """

    name: str
    honest: bool
    level: str
    holds: bool


def check_names() -> list[str]:
    """The name of every check of the suite, without its variants."""
    names: dict[str, None] = {}
    for path in sorted(SUITE.glob("test_*.py")):
        module = importlib.import_module(f"core_conformance.suite.{path.stem}")
        for item in vars(module).values():
            marks = getattr(item, "pytestmark", []) if getattr(item, "__module__", "") == module.__name__ else []
            names |= dict.fromkeys(str(mark.args[0]) for mark in marks if mark.name == MARK)
    return sorted(names)


def check_of(check_id: str, names: Sequence[str]) -> str:
    """The check that an id is a variant of."""
    found = [name for name in names if check_id == name or check_id.startswith((f"{name}/", f"{name}-"))]
    return max(found, key=len, default=check_id)


def render(proofs: Sequence[Proof], ids: Sequence[str]) -> str:
    """The page.

    Args:
        proofs: Of every mutant and every honest variant.
        ids: All ids of the suite.
    """
    names = check_names()
    mutants = [proof for proof in proofs if not proof.honest]
    honest = [proof for proof in proofs if proof.honest]
    killed = sum(proof.holds for proof in mutants)
    passed = sum(proof.holds for proof in honest)
    lines = [
        _HEAD,
        f"**{killed} of {len(mutants)} mutants killed, {passed} of {len(honest)} honest variants passed.**",
        "",
    ]
    lines += _mutant_table(mutants, names)
    lines += _honest_table(honest)
    lines += _check_table(mutants, ids, names)
    return "\n".join(lines).rstrip() + "\n"


def read_rows(page: str) -> list[Row]:
    """What a page says of each variant."""
    rows = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| L") and re.fullmatch(r"L\d", cells[0]):
            rows.append(Row(name=cells[1], honest=False, level=cells[0], holds=cells[2] == "killed"))
        elif line.startswith("| honest"):
            rows.append(Row(name=cells[1], honest=True, level="", holds=cells[2] == "passed"))
    return rows


def _mutant_table(mutants: Sequence[Proof], names: Sequence[str]) -> Iterator[str]:
    yield from ("## Mutants", "", "| level | mutant | | must be killed by | ids that fail | checks that kill it |")
    yield "|---|---|---|---|---|---|"
    for proof in sorted(mutants, key=lambda proof: (proof.level, proof.first, proof.name)):
        checks = dict.fromkeys(_short(check_of(check_id, names)) for check_id in proof.killed_by)
        verdict = "killed" if proof.holds else "**survived**"
        counts = f"{len(proof.killed_by)} of {len(proof.ran)}"
        by = ", ".join(f"`{name}`" for name in sorted(checks))
        yield f"| {proof.level} | {proof.name} | {verdict} | `{_short(proof.first)}` | {counts} | {by} |"
    yield ""


def _honest_table(honest: Sequence[Proof]) -> Iterator[str]:
    yield from ("## Honest variants", "", "| | variant | | ids that pass |", "|---|---|---|---|")
    for proof in honest:
        failed = len(proof.killed_by) + len(proof.crashed)
        verdict = "passed" if proof.holds else "**rejected**"
        yield f"| honest | {proof.name} | {verdict} | {len(proof.ran) - failed} of {len(proof.ran)} |"
    yield ""


def _check_table(mutants: Sequence[Proof], ids: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    kills: dict[str, set[str]] = defaultdict(set)
    killers: set[str] = set()
    for proof in mutants:
        for check_id in proof.killed_by:
            kills[check_of(check_id, names)].add(proof.name)
            killers.add(check_id)
    of_check: dict[str, list[str]] = defaultdict(list)
    for check_id in ids:
        of_check[check_of(check_id, names)].append(check_id)
    idle = [check for check in sorted(of_check) if not kills[check]]
    yield from ("## Checks", "", f"{len(of_check) - len(idle)} of {len(of_check)} checks kill a mutant.", "")
    if idle:
        yield from ("Kills none: " + ", ".join(f"`{check}`" for check in idle) + ".", "")
    yield from ("| check | ids that kill | mutants killed |", "|---|---|---|")
    for check in sorted(of_check):
        there = of_check[check]
        yield f"| `{check}` | {sum(i in killers for i in there)} of {len(there)} | {len(kills[check])} |"
    quiet = [
        check_id
        for check in sorted(of_check)
        if kills[check]
        for check_id in of_check[check]
        if check_id not in killers
    ]
    if quiet:
        yield from ("", "Ids of these that kill none: " + ", ".join(f"`{i}`" for i in quiet) + ".")


def _short(name: str) -> str:
    """Without the level, which stands in a column of its own."""
    return name.partition("/")[2]
