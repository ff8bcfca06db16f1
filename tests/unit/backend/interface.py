"""The public interface of the contract as data.

To record it, from the root of the repository: python -m tests.unit.backend.interface --write
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

SNAPSHOT = Path(__file__).with_name("snapshot.json")
MODULES = ("core.spec", "core.backend", "core.backend.ops")
"""What a vendor may import."""

Record = dict[str, Any]


def describe_interface() -> Record:
    """Module to name to description, without `since`."""
    return {name: _module(importlib.import_module(name)) for name in MODULES}


def with_since(interface: Record, old: Record, version: str) -> Record:
    """The interface with the contract version in which each name came: the recorded one, or `version` for new ones."""
    return {
        module: {
            name: {"since": old.get(module, {}).get(name, {}).get("since", version), **entry}
            for name, entry in names.items()
        }
        for module, names in interface.items()
    }


def _module(module: ModuleType) -> Record:
    return {name: _describe(getattr(module, name)) for name in sorted(module.__all__)}


def _describe(value: Any) -> Record:
    if inspect.isclass(value):
        return _class(value)
    if inspect.isfunction(value):
        return {"kind": "function", "signature": str(inspect.signature(value))}
    if isinstance(value, dict):
        return {"kind": "registry", "names": sorted(value) if value and "linear" in value else []}
    return {"kind": "value", "value": repr(value).replace("typing.", "")}


def _class(cls: type) -> Record:
    record: Record = {"kind": "class", "bases": [base.__name__ for base in cls.__bases__]}
    if issubclass(cls, enum.Enum):
        return record | {"members": {member.name: repr(member.value) for member in cls}}
    if dataclasses.is_dataclass(cls):
        record["fields"] = {field.name: _field(field) for field in dataclasses.fields(cls)}
    operation = cls.__dict__.get("name")
    if isinstance(operation, str):
        record["name"] = operation
    made = {"__init__"} if dataclasses.is_dataclass(cls) else set()
    members = {name: _member(m) for name, m in vars(cls).items() if name not in made and _is_public(name, m)}
    return record | ({"members": members} if members else {})


def _field(field: dataclasses.Field[Any]) -> Record:
    record: Record = {"type": str(field.type)}
    if field.default is not dataclasses.MISSING:
        record["default"] = repr(field.default)
    elif field.default_factory is not dataclasses.MISSING:
        record["default"] = f"{getattr(field.default_factory, '__name__', 'factory')}()"
    return record | dict(field.metadata)


def _is_public(name: str, member: Any) -> bool:
    plain = inspect.isfunction(member) or isinstance(member, (property, classmethod, staticmethod))
    return plain and (not name.startswith("_") or name == "__init__")


def _member(member: Any) -> str:
    if isinstance(member, property):
        return "property"
    function = getattr(member, "__func__", member)
    mark = "abstract " if getattr(function, "__isabstractmethod__", False) else ""
    return mark + str(inspect.signature(function))


def main() -> None:
    """Writes the snapshot; `since` of known names stays."""
    from core.spec import CONTRACT_VERSION

    old = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    now = with_since(describe_interface(), old, ".".join(map(str, CONTRACT_VERSION)))
    SNAPSHOT.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.unit.backend.interface --write")
    main()
