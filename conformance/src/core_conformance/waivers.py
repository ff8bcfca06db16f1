"""Waivers: known failures that somebody answers for, until a day."""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core_conformance.records import Outcome, Record

__all__ = ["Waiver", "apply_waivers", "read_waivers"]


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """Covers failures of some ids on one backend and hardware until a day.

    Args:
        ids: Ids or patterns with `*`.
        backend: Name of the backend.
        hardware: `DeviceInfo.arch`.
        url: Where the failure is being dealt with.
        expires: Last day on which it holds.
    """

    ids: tuple[str, ...]
    backend: str
    hardware: str
    url: str
    expires: datetime.date

    def covers(self, check_id: str, backend: str, hardware: str) -> bool:
        """Whether it names this id, backend and hardware."""
        mine = self.backend == backend and self.hardware == hardware
        return mine and any(fnmatch.fnmatchcase(check_id, pattern) for pattern in self.ids)

    @property
    def expired(self) -> bool:
        """Whether its last day is over."""
        return self.expires < datetime.date.today()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "ids": list(self.ids), "expires": self.expires.isoformat()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Waiver:
        """The waiver of `to_dict`."""
        return cls(**{**data, "ids": tuple(data["ids"]), "expires": datetime.date.fromisoformat(data["expires"])})


def read_waivers(path: Path) -> list[Waiver]:
    """Waivers of a TOML file: `[[waiver]]` tables with ids, backend, hardware, url and expires.

    Raises:
        ConfigError: the file cannot be read, or an entry is incomplete.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("waiver", [])
        return [Waiver(**{**table, "ids": tuple(table["ids"])}) for table in tables]
    except (OSError, tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise ConfigError(
            f"waivers in {path} cannot be used ({error}); each [[waiver]] needs ids, backend, hardware, url and expires"
        ) from error


def apply_waivers(records: Sequence[Record], waivers: Sequence[Waiver], backend: str, hardware: str) -> list[Record]:
    """The records, with FAIL turned into WAIVED where a waiver that has not expired covers it."""
    return [_waived(record, waivers, backend, hardware) for record in records]


def _waived(record: Record, waivers: Sequence[Waiver], backend: str, hardware: str) -> Record:
    if record.outcome is not Outcome.FAIL:
        return record
    for waiver in waivers:
        if not waiver.covers(record.id, backend, hardware):
            continue
        if not waiver.expired:
            reason = f"waived until {waiver.expires} ({waiver.url}): {record.reason}"
            return dataclasses.replace(record, outcome=Outcome.WAIVED, reason=reason)
        expired = f"its waiver expired on {waiver.expires} ({waiver.url}): {record.reason}"
        return dataclasses.replace(record, reason=expired)
    return record
