"""Operations as data: `OpSpec` says what is wanted, a record of run-time tensors is what the bound callable gets.

An OpSpec holds no run-time value. It is resolved once at load, and `Backend.bind` bakes it into a plain callable that
takes exactly one argument, the operation's record. T stands for packed tokens (requests with few tokens first), R for
requests, index tensors are int32 on the device.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from core.spec import DType

__all__ = [
    "OPERATIONS",
    "Args",
    "Determinism",
    "OpSpec",
    "check_args",
    "newer_fields",
    "optional",
    "since",
]

OPERATIONS: dict[str, type[OpSpec]] = {}
"""Every operation of the contract by name."""


class Determinism(enum.IntEnum):
    """Classes of reproducibility; a higher class includes the lower ones."""

    D0 = 0
    """None promised."""
    D1 = 1
    """Equal from run to run."""
    D2 = 2
    """Equal whatever else is in the batch."""
    D3 = 3
    """Equal whatever else is in the batch and however a prompt is cut into chunks."""


def optional(feature: str, *, minor: int = 0) -> Any:
    """A run-time field that is filled only where the OpSpec's `features` name `feature`; None elsewhere."""
    return field(default=None, metadata={"feature": feature, "since": minor})


def since(minor: int, default: Any) -> Any:
    """A field that came with contract 1.`minor`; an older plugin is never asked for another value than `default`."""
    return field(default=default, metadata={"since": minor})


@dataclass(slots=True, kw_only=True)
class Args:
    """Base of the records of run-time tensors. Records only grow; each new field is `optional`."""


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """What is wanted of an operation, without any run-time value.

    Args:
        dtype: Type of the activations that go in and, where nothing else is said, come out.
        features: Names of the optional parts of the record that will be filled.
        determinism: The least class asked for.
    """

    name: ClassVar[str]
    args: ClassVar[type[Args]]
    minor: ClassVar[int] = 0
    """Minor of the contract with which the operation came; an older plugin is never asked for it."""

    dtype: DType
    features: frozenset[str] = frozenset()
    determinism: Determinism = Determinism.D0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__ and cls.__module__.startswith("core.backend.ops"):
            OPERATIONS[cls.name] = cls

    def has(self, feature: str) -> bool:
        """Whether the optional part will be filled."""
        return feature in self.features

    def describe(self) -> str:
        """One line for people: `attention(dtype=bfloat16, num_heads=9, ...)`, fields at their default left out."""
        parts = [f"{name}={_plain(value)}" for name, value in self._told()]
        return f"{self.name}({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Name and every static parameter as JSON values, in a stable order."""
        values = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"op": self.name, **dict(sorted(values.items()))}

    def _told(self) -> Iterator[tuple[str, Any]]:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.default is dataclasses.MISSING or value != f.default:
                yield f.name, value


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, enum.StrEnum):
        return value.value
    if isinstance(value, enum.IntEnum):
        return value.name
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def newer_fields(op: OpSpec, built_minor: int) -> list[str]:
    """Fields of `op` that came after contract 1.`built_minor` and differ from their default.

    A plugin built against that minor does not know them: the operation is NO for it, without a call.
    """
    names = [
        f.name
        for f in dataclasses.fields(op)
        if f.metadata.get("since", 0) > built_minor and getattr(op, f.name) != f.default
    ]
    record = {
        f.metadata["feature"]: f.metadata["since"] for f in dataclasses.fields(op.args) if "feature" in f.metadata
    }
    return names + sorted(name for name in op.features if record.get(name, 0) > built_minor)


def check_args(op: OpSpec, args: Args) -> None:
    """Asserts that `args` is the record of `op` and fills exactly the optional fields that `op.features` name."""
    assert type(args) is op.args, f"{op.name} takes {op.args.__name__}, got {type(args).__name__}"
    for f in dataclasses.fields(args):
        wanted = f.metadata.get("feature")
        if wanted is not None and wanted not in op.features:
            assert getattr(args, f.name) is None, f"{op.name}: field {f.name!r} needs feature {wanted!r}"
