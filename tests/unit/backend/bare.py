"""The smallest backend there is: four methods over torch on the host, every operation composed by the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from core.backend import Backend, OpenConfig, UnsupportedError, Verdict
from core.backend.negotiate import Binder
from core.backend.ops import OpSpec
from core.spec import BackendInfo, Capabilities, DeviceInfo

DEVICE = DeviceInfo(index=0, arch="bare", memory_bytes=0, sdk="none")
INFO = BackendInfo(name="bare", vendor="nobody", api=(1, 0, 0), load="bare:BareBackend")


class BareBackend(Backend):
    """Four methods and nothing else."""

    def probe(self) -> list[DeviceInfo]:
        return [DEVICE]

    def open(self, index: int, config: OpenConfig) -> None:
        self.device = torch.device("cpu")
        self.capabilities = Capabilities()

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.composite()

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        raise UnsupportedError(op.name, "the bare backend has no kernels")


def opened() -> BareBackend:
    """An open bare backend."""
    backend = BareBackend()
    backend.open(0, OpenConfig())
    return backend


def binder(block_size: int = 4) -> Binder:
    """A binder over an open bare backend."""
    return Binder(opened(), INFO, DEVICE, block_size=block_size)


def bound(op: OpSpec) -> Callable[..., Any]:
    """The callable of an operation on the bare backend."""
    return binder().bind(op)
