"""Backends that break a promise outside of their kernels."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.backend import (
    Batch,
    GroupSpec,
    OpenConfig,
    Packed,
    Pending,
    Plan,
    Role,
    Scheme,
    Verdict,
    WeightSource,
)
from core.backend.ops import OpSpec
from core.spec import BackendInfo, Capabilities, DeviceInfo
from core_conformance.bare import BareBackend
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS", "backend_bug"]


# -- the four methods --------------------------------------------------------------------------------------------------


class OtherContract(BareBackend):
    """Announces another major version of the contract."""

    info: ClassVar[BackendInfo] = BackendInfo(
        name="reference", vendor="core-inference", api=(2, 0, 0), load="", priority=-1
    )


class PlanWithoutInto(BareBackend):
    """Its `plan` does not know the parameter that refreshes a plan in place."""

    def plan(self, batch: Batch, group: GroupSpec) -> Plan:  # type: ignore[override]
        return super().plan(batch, group)


class ProbeCounts(BareBackend):
    """Finds one device more at each call."""

    _found = 0

    def probe(self) -> list[DeviceInfo]:
        ProbeCounts._found += 1
        [device] = super().probe()
        return [DeviceInfo(index=i, arch=device.arch, memory_bytes=0, sdk=device.sdk) for i in range(self._found)]


class ProbeNeedsHome(BareBackend):
    """Looks for its driver's settings in the home directory, and there must be one."""

    def probe(self) -> list[DeviceInfo]:
        assert os.environ["HOME"]
        return super().probe()


class CapabilitiesForgotten(BareBackend):
    """`open` names block sizes that it does not have."""

    def open(self, index: int, config: OpenConfig) -> None:
        super().open(index, config)
        self.capabilities = Capabilities(block_sizes=(16, 0, 16))


class StaysClosed(BareBackend):
    """What is copied after the second `open` is lost: the queue of the first one is still named."""

    _num_opened = 0

    def open(self, index: int, config: OpenConfig) -> None:
        super().open(index, config)
        self._num_opened += 1

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        return super().to_device(src if self._num_opened < 2 else torch.zeros_like(src), dst)


class ReadyOnlyAfterProbe(BareBackend):
    """`probe` of the same process starts the driver; without it copies do nothing."""

    _started = False

    def probe(self) -> list[DeviceInfo]:
        ReadyOnlyAfterProbe._started = True
        return super().probe()

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        return super().to_device(src if self._started else torch.zeros_like(src), dst)


class SetsTheDefaultType(BareBackend):
    """`open` makes bfloat16 the default of the process."""

    def open(self, index: int, config: OpenConfig) -> None:
        super().open(index, config)
        torch.set_default_dtype(torch.bfloat16)

    def close(self) -> None:
        torch.set_default_dtype(torch.float32)


class SeedsTorch(BareBackend):
    """`pack` draws from torch's own random numbers."""

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        torch.rand(1)
        return super().pack(source, scheme, role, dtype)


class ChangesItsMind(BareBackend):
    """Says something else once it is open."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.composite("open" if hasattr(self, "device") else "closed")


class BindsWhatItDenies(BareBackend):
    """Has kernels for what it does not declare."""

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        made: Callable[..., Any] = oracle(op)
        return made


class RefusesWithValueError(BareBackend):
    """Refuses, with an error that says nothing of support."""

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        raise ValueError(f"unknown operation {op.name}")


class NoGroupedHeads(BareBackend):
    """Declines attention whose heads are grouped."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        if op.name == "attention" and getattr(op, "num_kv_heads", 0) < getattr(op, "num_heads", 0):
            return Verdict.no("its kernel wants a key head for each query head")
        return super().supports(op, device)


def _gives_nothing(op: OpSpec) -> Any:
    """Binds, and there is nothing to call."""
    return None


def backend_bug(name: str, first: str, backend: type[BareBackend]) -> Mutant:
    """A mutant of L0: a whole backend; `first` without the level."""
    return Mutant(name=name, level="L0", first=f"L0/{first}", backend=backend)


MUTANTS: tuple[Mutant, ...] = (
    backend_bug("built for another major version", "entry-point", OtherContract),
    backend_bug("plan without into", "signatures", PlanWithoutInto),
    backend_bug("probe finds more each time", "probe-cheap", ProbeCounts),
    backend_bug("probe needs a home directory", "probe-never-raises", ProbeNeedsHome),
    backend_bug("block sizes that are none", "open-sets-attributes", CapabilitiesForgotten),
    backend_bug("copies lost after a second open", "reopen", StaysClosed),
    backend_bug("driver started by probe alone", "spawn", ReadyOnlyAfterProbe),
    backend_bug("default dtype set", "leaves-torch-alone", SetsTheDefaultType),
    backend_bug("torch's random numbers used up", "leaves-torch-alone", SeedsTorch),
    backend_bug("verdict changes with open", "supports-pure", ChangesItsMind),
    backend_bug("binds what it denies", "declared-unsupported-raises", BindsWhatItDenies),
    backend_bug("refuses with a ValueError", "declared-unsupported-raises", RefusesWithValueError),
    backend_bug("grouped heads declined", "mandatory-core", NoGroupedHeads),
    Mutant(
        name="kernel bound without a declaration",
        level="L1",
        first="L1/operations",
        backend=BindsWhatItDenies,
        also=("L1/operations",),
    ),
    kernel_bug("kernel that is none", "operations/rms_norm", {"rms_norm": _gives_nothing}),
)
