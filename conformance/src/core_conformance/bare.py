"""The smallest backend there is: four methods over torch on the host, every operation composed by the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from core.backend import Backend, OpenConfig, UnsupportedError, Verdict
from core.backend.ops import OpSpec
from core.spec import BackendInfo, Capabilities, DeviceInfo

__all__ = ["INFO", "BareBackend"]

INFO = BackendInfo(
    name="reference", vendor="core-inference", api=(1, 0, 0), load="core_conformance.bare:BareBackend", priority=-1
)
"""How it would announce itself; it is no plugin."""


class BareBackend(Backend):
    """The reference as a backend: what every torch device gives before a vendor has written a kernel."""

    def probe(self) -> list[DeviceInfo]:
        return [DeviceInfo(index=0, arch="reference", memory_bytes=0, sdk=f"torch {torch.__version__}", simulated=True)]

    def open(self, index: int, config: OpenConfig) -> None:
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(block_sizes=(16, 4, 32))

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        return Verdict.composite("it has no kernels")

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        raise UnsupportedError(op.describe(), "it has no kernels", "bind through core.backend.negotiate.Binder")
