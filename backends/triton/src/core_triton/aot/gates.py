"""What compiled code must be: no spills, within the target's shared memory, with the right matrix instruction.

`exceptions.toml` lists what is let off, each entry with a reason. An entry that lets nothing off is itself a finding.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from typing import Literal

from core.errors import CoreError
from core_triton.aot.compiling import NOT_COMPILED, Compiled
from core_triton.aot.resources import family_of
from core_triton.target import TARGETS, Target

__all__ = ["Exemption", "Finding", "exemptions", "judge", "wanted_instruction"]

Gate = Literal["compiles", "spills", "shared", "instruction"]
_GATES: tuple[Gate, ...] = ("compiles", "spills", "shared", "instruction")

_WARPGROUP_ROWS, _WARPGROUP = 64, 4
"""wgmma and tcgen05 work for four warps together on 64 rows and more; smaller tiles can only use mma."""


@dataclass(frozen=True)
class Finding:
    """A gate that a build does not pass."""

    gate: Gate
    compiled: Compiled
    reason: str

    def line(self) -> str:
        """One line for people."""
        job = self.compiled.job
        return f"{self.gate}: {job.op} [{job.label}] on {job.arch}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """One entry of `exceptions.toml`.

    Args:
        gate: Which gate it opens.
        op: Pattern of the operation's name.
        label: Pattern of the build's label.
        targets: Patterns of targets.
        reason: Why, for the table.
        at_most: Most spills, scalar ones too, that are let off; 0 for any number and for the other gates.
    """

    gate: Gate
    op: str
    targets: tuple[str, ...]
    reason: str
    label: str = "*"
    at_most: int = 0

    def covers(self, finding: Finding) -> bool:
        """Whether it lets the finding off."""
        job, found = finding.compiled.job, finding.compiled.resources
        spilled = 0 if found is None else found.spills + found.scalar_spills
        if self.at_most and finding.gate == "spills" and spilled > self.at_most:
            return False
        return (
            finding.gate == self.gate
            and fnmatchcase(job.op, self.op)
            and fnmatchcase(job.label, self.label)
            and any(fnmatchcase(job.arch, pattern) for pattern in self.targets)
        )


def exemptions(text: str | None = None) -> list[Exemption]:
    """The entries of `exceptions.toml`, or of `text` in its form.

    Raises:
        CoreError: an entry has no reason, or an unknown gate or field.
    """
    if text is None:
        text = resources.files("core_triton.aot").joinpath("exceptions.toml").read_text(encoding="utf-8")
    found = []
    for entry in tomllib.loads(text).get("exception", []):
        try:
            exemption = Exemption(**{**entry, "targets": tuple(entry["targets"])})
        except (TypeError, KeyError) as error:
            raise CoreError(
                f"exceptions.toml: entry {entry} is not one ({error}); see Exemption for its fields"
            ) from None
        if exemption.gate not in _GATES or len(exemption.reason) < 20:
            raise CoreError(
                f"exceptions.toml: entry {entry} needs a gate of {', '.join(_GATES)}, and a reason to be read"
            )
        found.append(exemption)
    return found


def wanted_instruction(compiled: Compiled, target: Target) -> str:
    """The kind of matrix instruction that the tile could use best on the target; "" where none is asked for."""
    if not compiled.matrix_wanted:
        return ""
    if target.family == "hip":
        return "mfma" if target.arch.startswith("gfx9") else "wmma"
    big = compiled.tile >= _WARPGROUP_ROWS and compiled.num_warps % _WARPGROUP == 0
    return {"sm_90": "wgmma", "sm_100": "tcgen05"}.get(target.arch, "mma") if big else "mma"


def _findings(compiled: Compiled) -> Iterable[Finding]:
    target, found = TARGETS[compiled.job.arch], compiled.resources
    if compiled.error == NOT_COMPILED:
        return
    if found is None:
        yield Finding("compiles", compiled, compiled.error)
        return
    if found.spills or found.scalar_spills:
        kind = f"{found.spills} spills" if found.spills else f"{found.scalar_spills} scalar spills"
        yield Finding("spills", compiled, f"{kind}, {found.stack_bytes} bytes of stack, {found.registers} registers")
    if found.shared_bytes > target.shared_bytes:
        yield Finding(
            "shared", compiled, f"{found.shared_bytes} bytes of {target.shared_bytes} that a program may have"
        )
    wanted = wanted_instruction(compiled, target)
    kinds = {family_of(instruction) for instruction in found.matrix}
    if wanted and wanted not in kinds:
        there = ", ".join(sorted(kinds)) or "no matrix instruction"
        yield Finding("instruction", compiled, f"{wanted} was wanted, {there} found")


def judge(
    results: Sequence[Compiled], listed: Sequence[Exemption], *, complete: bool
) -> tuple[list[Finding], list[tuple[Finding, Exemption]], list[Exemption]]:
    """Findings that count, findings that are let off with what lets them off, and entries that let nothing off.

    Args:
        results: What was compiled.
        listed: The exceptions.
        complete: Whether every build was compiled; else no entry can be called idle.
    """
    open_, let_off, used = [], [], set()
    for finding in (finding for compiled in results for finding in _findings(compiled)):
        cover = next((exemption for exemption in listed if exemption.covers(finding)), None)
        if cover is None:
            open_.append(finding)
        else:
            used.add(cover)
            let_off.append((finding, cover))
    idle = [exemption for exemption in listed if complete and exemption not in used]
    return open_, let_off, idle
