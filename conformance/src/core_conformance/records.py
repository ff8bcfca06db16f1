"""Outcomes of checks and the record that each leaves behind."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ErrorOutcome", "Findings", "Mode", "Outcome", "Record", "UnsupportedOutcome", "level_of"]


class Outcome(enum.StrEnum):
    """How a check ended."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"
    """Declared so, and refused with UnsupportedError when it was asked for all the same."""
    WAIVED = "WAIVED"
    """A FAIL that a valid waiver covers."""
    ERROR = "ERROR"
    """The suite was not run as it must be: a raw skip, xfail or rerun, an id that is missing or twice there."""
    NOT_RUN = "NOT_RUN"
    """Left out by the caller."""

    @property
    def acceptable(self) -> bool:
        """Whether a level may be complete with it."""
        return self in (Outcome.PASS, Outcome.UNSUPPORTED, Outcome.WAIVED)


class Mode(enum.StrEnum):
    """On what the check ran; the weakest evidence first."""

    COMPILED = "COMPILED"
    """Nothing ran: the compiler for the device took it. No certificate is given for it."""
    SIMULATED = "SIMULATED"
    """An interpreter, or a stand-in for the device."""
    VALIDATED = "VALIDATED"
    """The device."""

    @property
    def rank(self) -> int:
        """0 for the weakest evidence."""
        return list(Mode).index(self)


class UnsupportedOutcome(Exception):
    """Ends a check whose feature the backend declares unsupported, after it was shown to refuse it.

    Args:
        reason: The backend's own words.
    """


class ErrorOutcome(Exception):
    """Ends a check that cannot be run as it must be, here and now: something that it needs is not installed.

    Args:
        reason: What is missing, and what to do.
    """


@dataclass
class Findings:
    """What a check that opens no device leaves for its record; the fields are those of `Record`."""

    err: float | None = None
    bound: float | None = None
    ratio: float | None = None
    op_table: str = ""
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: str = ""
    dtype: str = ""
    quantization: str = ""
    parallelism: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one check says of one backend.

    Args:
        id: Stable name, "L1/attention/counting-bf16".
        outcome: How it ended.
        reason: Why, where it is no PASS: operation, first wrong index, value, bound.
        err: Largest error that was compared with a bound; None where nothing was.
        bound: The bound of that very element.
        ratio: Largest err / bound, on a PASS too: how far the backend is from failing.
        op_table: Hash of how the operations of the check were resolved; empty where it bound none.
        kinds: Operations of the check to NATIVE or COMPOSITE.
        notes: Further numbers that the check wants to be kept (ambiguous tokens, ...).
        seconds: Time it took.
        mode: On what it ran.
        model: Which model it drove; empty where none.
        dtype: Of that model's activations.
        quantization: Scheme of its weights; empty where they are plain.
        parallelism: How it was spread ("tp2"); empty for one device.
    """

    id: str
    outcome: Outcome
    reason: str = ""
    err: float | None = None
    bound: float | None = None
    ratio: float | None = None
    op_table: str = ""
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    mode: Mode = Mode.VALIDATED
    model: str = ""
    dtype: str = ""
    quantization: str = ""
    parallelism: str = ""

    @property
    def ran(self) -> bool:
        """Whether it says something of the backend."""
        return self.outcome is not Outcome.NOT_RUN

    def to_dict(self) -> dict[str, Any]:
        """For JSON; numbers that are not finite become "inf", "-inf" or "nan", which JSON has no numbers for."""
        made: dict[str, Any] = _finite(dataclasses.asdict(self))
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """The record of `to_dict`; fields that this version does not know are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: value for name, value in data.items() if name in known}
        numbers = {name: None if kept.get(name) is None else float(kept[name]) for name in ("err", "bound", "ratio")}
        return cls(**{**kept, **numbers, "outcome": Outcome(kept["outcome"]), "mode": Mode(kept["mode"])})


def level_of(check_id: str) -> str:
    """ "L1" of "L1/attention/counting-bf16"."""
    return check_id.partition("/")[0]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
