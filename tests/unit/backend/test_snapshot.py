"""The contract's interface is what was recorded: a change must be meant, and only add once 1.0 is out."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from interface import MODULES, SNAPSHOT, Record, describe_interface, with_since

from core.backend.ops import OPERATIONS
from core.spec import CONTRACT_VERSION

HOW = (
    "the public interface of the contract changed.\nIf that is meant: write a decision record, give new fields "
    "`since(minor, default)` or `optional(feature, minor=...)`, and run\n"
    "  python -m tests.unit.backend.interface --write\nand commit snapshot.json with it."
)


def recorded() -> Record:
    snapshot: Record = json.loads(SNAPSHOT.read_text())
    return snapshot


def without_since(interface: Record) -> Record:
    return {
        module: {name: {k: v for k, v in entry.items() if k != "since"} for name, entry in names.items()}
        for module, names in interface.items()
    }


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Paths at which two records differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(set(old) | set(new))
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{path}.{key}")]
    return [] if old == new else [f"{path[1:]}: {old!r} -> {new!r}"]


def test_the_interface_is_the_recorded_one() -> None:
    lines = differences(without_since(recorded()), json.loads(json.dumps(describe_interface())))
    assert not lines, "\n".join([*lines, HOW])


def test_every_name_says_since_when() -> None:
    for module, names in recorded().items():
        for name, entry in names.items():
            major, minor = map(int, entry["since"].split("."))
            assert (major, minor) <= CONTRACT_VERSION, f"{module}.{name}"


def test_no_field_is_newer_than_the_contract() -> None:
    for op in OPERATIONS.values():
        for field in (*dataclasses.fields(op), *dataclasses.fields(op.args)):
            assert field.metadata.get("since", 0) <= CONTRACT_VERSION[1], f"{op.name}.{field.name}"


def test_the_snapshot_covers_every_operation() -> None:
    names = recorded()["core.backend.ops"]
    for op in OPERATIONS.values():
        assert names[op.__name__]["name"] == op.name
        assert "fields" in names[op.args.__name__]
    assert set(recorded()) == set(MODULES)


def test_writing_again_keeps_since_and_marks_what_is_new() -> None:
    old = {"m": {"kept": {"since": "1.0", "kind": "value"}, "gone": {"since": "1.0"}}}
    now = with_since({"m": {"kept": {"kind": "class"}, "fresh": {"kind": "value"}}}, old, "1.4")
    assert now == {"m": {"kept": {"since": "1.0", "kind": "class"}, "fresh": {"since": "1.4", "kind": "value"}}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("core.backend", "Backend", "members", "bind"), "abstract (self)"),
        (("core.backend.ops", "AttentionOp", "fields", "window", "default"), "1"),
        (("core.backend.ops", "SampleArgs", "fields", "extra"), {"type": "Tensor"}),
        (("core.spec", "DType", "members", "FLOAT4"), "'float4'"),
    ],
)
def test_a_change_is_seen_and_named(path: tuple[str, ...], value: Any) -> None:
    changed = json.loads(json.dumps(describe_interface()))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    lines = differences(describe_interface(), changed)
    assert len(lines) == 1 and lines[0].startswith(".".join(path))
