"""How most bugs are planted: another OpSpec, another record, or another result than those of the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from core.backend.reference import COMPOSITES, DECOMPOSITIONS
from core_conformance.mutants.backend import Maker
from core_conformance.subject import oracle

__all__ = ["after", "before", "changed_op", "changed_part"]


def changed_op(**changes: Callable[[Any], Any]) -> Maker:
    """The reference with other static parameters: field to function of the OpSpec."""

    def make(op: Any) -> Callable[[Any], Any]:
        return oracle(dataclasses.replace(op, **{field: fn(op) for field, fn in changes.items()}))

    return make


def before(change: Callable[[Any, Any], Any]) -> Maker:
    """The reference over another record: `change(op, args)`."""

    def make(op: Any) -> Callable[[Any], Any]:
        honest = oracle(op)
        return lambda args: honest(change(op, args))

    return make


def after(change: Callable[[Any, Any, Any], Any]) -> Maker:
    """The reference with another result: `change(op, args, result)`."""

    def make(op: Any) -> Callable[[Any], Any]:
        honest = oracle(op)
        return lambda args: change(op, args, honest(args))

    return make


def changed_part(name: str, change: Callable[[Any, Callable[[Any], Any]], Callable[[Any], Any]]) -> Maker:
    """A coarse operation of reference parts, of which one is another: `change(OpSpec of the part, its callable)`."""

    def make(op: Any) -> Callable[[Any], Any]:
        specs = DECOMPOSITIONS[op.name](op)
        parts = {part: oracle(spec) for part, spec in specs.items()}
        if name in parts:
            parts[name] = change(specs[name], parts[name])
        return COMPOSITES[op.name](op, **parts)

    return make
