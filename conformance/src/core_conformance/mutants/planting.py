"""How most bugs are planted: another OpSpec, another record, or another result than those of the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from core_conformance.mutants.backend import Maker
from core_conformance.subject import oracle

__all__ = ["after", "before", "changed_op"]


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
