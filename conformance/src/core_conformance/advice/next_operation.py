"""Which operation to write next: the one among the COMPOSITE ones that takes the largest share of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from core.backend import Kind
from core_conformance.advice.step_times import PHASES, OperationTime, StepTimes

__all__ = ["Advice", "OperationShare", "SpecShare", "advise"]


@dataclass(frozen=True, kw_only=True)
class SpecShare:
    """One set of static parameters.

    Args:
        spec: Name and static parameters, in one line.
        reason: Why it is COMPOSITE; empty where it is NATIVE.
        decode: Share of a decode step, in [0, 1].
        prefill: Share of a prefill step, in [0, 1].
    """

    spec: str
    reason: str
    decode: float
    prefill: float


@dataclass(frozen=True, kw_only=True)
class OperationShare:
    """An operation as far as it is done in one way.

    Args:
        operation: Name.
        kind: NATIVE or COMPOSITE.
        decode: Share of a decode step, in [0, 1]; that of its parts is theirs.
        prefill: Share of a prefill step, in [0, 1].
        decode_calls: Calls a decode step.
        prefill_calls: Calls a prefill step.
        parts: What it is composed of, where the contract says so.
        specs: Its static parameters, those first that take most.
    """

    operation: str
    kind: str
    decode: float
    prefill: float
    decode_calls: float
    prefill_calls: float
    parts: tuple[str, ...]
    specs: tuple[SpecShare, ...]

    @property
    def weight(self) -> float:
        """What it is ranked by: the mean of its shares."""
        return (self.decode + self.prefill) / 2


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a measurement says.

    Args:
        next: What to write; None where everything is NATIVE.
        operations: Everything that was measured, that first which takes most.
        outside_decode: Share of a decode step outside of all operations, in [0, 1].
        outside_prefill: Share of a prefill step outside of all operations, in [0, 1].
    """

    next: OperationShare | None
    operations: tuple[OperationShare, ...]
    outside_decode: float
    outside_prefill: float

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `next` is the name alone."""
        return asdict(self) | {"next": self.next.operation if self.next else None}


def advise(times: StepTimes) -> Advice:
    """Ranks what was measured."""
    groups: dict[tuple[str, Kind], list[OperationTime]] = {}
    for entry in times.operations:
        groups.setdefault((entry.op.name, entry.row.kind), []).append(entry)
    rows = sorted((_share(times, entries) for entries in groups.values()), key=lambda row: -row.weight)
    return Advice(
        next=next((row for row in rows if row.kind != Kind.NATIVE), None),
        operations=tuple(rows),
        outside_decode=times.outside("decode"),
        outside_prefill=times.outside("prefill"),
    )


def _share(times: StepTimes, entries: list[OperationTime]) -> OperationShare:
    specs = [
        SpecShare(
            spec=entry.op.describe(),
            reason="" if entry.row.kind is Kind.NATIVE else entry.row.reason,
            decode=times.share(entry, "decode"),
            prefill=times.share(entry, "prefill"),
        )
        for entry in entries
    ]
    calls = {phase: sum(entry.calls[phase] for entry in entries) / times.num_steps[phase] for phase in PHASES}
    return OperationShare(
        operation=entries[0].op.name,
        kind=entries[0].row.kind.value,
        decode=sum(spec.decode for spec in specs),
        prefill=sum(spec.prefill for spec in specs),
        decode_calls=calls["decode"],
        prefill_calls=calls["prefill"],
        parts=tuple(part.op.name for part in entries[0].row.parts),
        specs=tuple(sorted(specs, key=lambda spec: -(spec.decode + spec.prefill))),
    )
