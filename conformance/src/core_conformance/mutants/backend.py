"""The reference backend with some operations done by kernels of a variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from core.backend import UnsupportedError, Verdict
from core.backend.ops import Determinism, OpSpec
from core.spec import DeviceInfo
from core_conformance.bare import INFO, BareBackend
from core_conformance.target import Target

__all__ = ["Maker", "MutantBackend", "mutant_target"]

Maker = Callable[[Any], Callable[[Any], Any]]
"""Makes the callable of an OpSpec."""


class MutantBackend(BareBackend):
    """Operations of `makers` are NATIVE and done by them, all others composed by the core.

    Args:
        makers: Operation name to its maker.
        determinism: Class that they declare.
    """

    makers: ClassVar[Mapping[str, Maker]] = {}
    """Of subclasses, which are made without arguments."""

    def __init__(self, makers: Mapping[str, Maker] | None = None, determinism: Determinism = Determinism.D1) -> None:
        self._makers = dict(self.makers if makers is None else makers)
        self._determinism = determinism

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        if op.name not in self._makers or "no_such_feature" in op.features:
            return Verdict.composite("it has no kernels")
        return Verdict.native(determinism=self._determinism)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        if self.supports(op, self.probe()[0]).kind != "NATIVE":
            raise UnsupportedError(op.describe(), "it has no kernels", "bind through core.backend.negotiate.Binder")
        return self._makers[op.name](op)


def mutant_target(makers: Mapping[str, Maker]) -> Target:
    """A target over such a backend."""
    return Target(info=INFO, make=lambda: MutantBackend(makers), package="core-conformance")
