"""One report of the reports of its shards, which must say the same of everything that they have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from core.errors import ConfigError
from core_conformance.must_pass_lists import LEVELS
from core_conformance.records import Record, level_of
from core_conformance.report.document import Report
from core_conformance.sharding import ALWAYS, Shard, parse_shard

__all__ = ["merge_reports"]

_OWN = ("shard", "date", "seconds")
"""Facts of a run in which shards differ; all others must be equal."""
_MOST_TOLD = 5
"""Differences that a message names."""


def merge_reports(reports: Sequence[Report], places: Sequence[str]) -> Report:
    """The report that one run of everything would have made.

    Args:
        reports: Of each shard once, in any order.
        places: Where each comes from, for messages.

    Returns:
        Every id with the record of the shard that ran it; the date is the first shard's, the seconds are the sum.

    Raises:
        ConfigError: a shard is missing or twice there, environments, suites or ids differ, an id ran in two shards, or
            an outcome of L0 is not the same in all.
    """
    shards = _shards(reports, places)
    order = sorted(range(len(reports)), key=lambda at: shards[at].index)
    parts = [reports[at] for at in order]
    names = [f"{places[at]} (shard {shards[at]})" for at in order]
    for part, name in zip(parts[1:], names[1:], strict=True):
        _refuse(_differing_facts(parts[0], part), f"{names[0]} and {name} come from different runs", _SAME)
        _refuse(_differing_ids(parts[0], part), f"{names[0]} and {name} do not have the same ids", _SAME)
        _refuse(_differing_outcomes(parts[0], part), f"{names[0]} and {name} disagree on {ALWAYS}", _SAME_DEVICE)
    twice = [
        check_id for check_id, found in _by_id(parts).items() if _num_ran(found) > 1 and level_of(check_id) != ALWAYS
    ]
    _refuse(twice, "these ids ran in more than one shard", _SAME)
    facts = dataclasses.replace(
        parts[0].facts,
        shard="",
        date=min(part.facts.date for part in parts),
        seconds=round(sum(part.facts.seconds for part in parts), 3),
    )
    records = [_counting(all_of_it) for _, all_of_it in sorted(_by_id(parts).items())]
    problems = list(dict.fromkeys(problem for part in parts for problem in part.problems))
    return Report(facts, records, problems)


_SAME = "run every shard with the same packages, options and kind of machine"
_SAME_DEVICE = "the shards did not have the same device, or it is not reliable: run them again on equal ones"


def _shards(reports: Sequence[Report], places: Sequence[str]) -> list[Shard]:
    if not reports:
        raise ConfigError("there is no report to merge; name those of every shard")
    found: dict[int, str] = {}
    shards: list[Shard] = []
    for report, place in zip(reports, places, strict=True):
        if not report.facts.shard:
            raise ConfigError(f"{place} is the report of a whole run, no shard's; merge only reports of `run --shard`")
        shard = parse_shard(report.facts.shard)
        if shards and shard.count != shards[0].count:
            raise ConfigError(f"{place} is shard {shard} and {places[0]} shard {shards[0]}; merge shards of one run")
        if shard.index in found:
            raise ConfigError(f"shard {shard} is there twice, in {found[shard.index]} and {place}; leave one out")
        found[shard.index] = place
        shards.append(shard)
    missing = [f"{index}/{shards[0].count}" for index in range(1, shards[0].count + 1) if index not in found]
    if missing:
        raise ConfigError(f"shard {', '.join(missing)} is missing; run it, and merge all {shards[0].count}")
    return shards


def _differing_facts(one: Report, other: Report) -> list[str]:
    return list(_differences("", one.facts.to_dict(), other.facts.to_dict(), _OWN))


def _differences(path: str, one: Any, other: Any, left_out: Sequence[str] = ()) -> Iterator[str]:
    """ "device.arch: 'a' and 'b'" for every field in which two JSON values differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other} - {*left_out}):
            yield from _differences(f"{path}.{name}" if path else name, one.get(name), other.get(name))
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


def _differing_ids(one: Report, other: Report) -> list[str]:
    """Ids of the suite; a package's own cases are left out of a report where they are not run."""
    mine, yours = ({record.id for record in report.records if level_of(record.id) in LEVELS} for report in (one, other))
    return [
        f"{check_id} is only in the {'first' if check_id in mine else 'second'}" for check_id in sorted(mine ^ yours)
    ]


def _differing_outcomes(one: Report, other: Report) -> list[str]:
    mine, yours = (
        {record.id: record.outcome for record in report.records if level_of(record.id) == ALWAYS}
        for report in (one, other)
    )
    return [
        f"{check_id}: {mine[check_id]} and {yours[check_id]}" for check_id in mine if mine[check_id] != yours[check_id]
    ]


def _by_id(parts: Sequence[Report]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for part in parts:
        for record in part.records:
            found.setdefault(record.id, []).append(record)
    return found


def _num_ran(records: Sequence[Record]) -> int:
    return sum(record.ran for record in records)


def _counting(records: Sequence[Record]) -> Record:
    """The record of the shard that ran the id; of L0 the first, since the others say the same."""
    return next((record for record in records if record.ran), records[0])


def _refuse(differences: Sequence[str], what: str, remedy: str) -> None:
    if differences:
        more = len(differences) - _MOST_TOLD
        told = "; ".join([*differences[:_MOST_TOLD], *([f"and {more} more"] if more > 0 else [])])
        raise ConfigError(f"{what}: {told}; {remedy}")
