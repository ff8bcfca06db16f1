"""Outcomes of checks and the record that each leaves behind."""

from __future__ import annotations

import dataclasses
import enum
import json
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
    """On what the check ran."""

    VALIDATED = "VALIDATED"
    """The device."""
    SIMULATED = "SIMULATED"
    """An interpreter, or a stand-in for the device."""


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

    def to_json(self) -> str:
        """One line of the report."""
        return json.dumps({"record": "check", **dataclasses.asdict(self)}, sort_keys=True)


def level_of(check_id: str) -> str:
    """ "L1" of "L1/attention/counting-bf16"."""
    return check_id.partition("/")[0]
