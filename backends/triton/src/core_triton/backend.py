"""What the backends over these kernels share: verdicts, binding, and the device's own torch calls."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from core.backend import Backend, MemoryInfo, OpenConfig, UnsupportedError, Verdict
from core.backend.ops import OpSpec
from core.errors import BackendUnavailableError
from core.spec import Capabilities, DeviceInfo
from core_triton import ops, registry, simulation
from core_triton.target import TARGETS, Target, interpreted

__all__ = ["TritonBackend"]


class TritonBackend(Backend):
    """A GPU whose operations are the Triton kernels of this package.

    A backend names its family and finds its devices. A simulated device has host tensors and the interpreter: the same
    refusals, tuning and launches, and nothing of a driver.
    """

    family: ClassVar[simulation.Family]
    """Triton's word for the driver."""

    def __init__(self) -> None:
        if simulation.environment(self.family):
            # For a process that nobody started for this device. It has no effect on kernels decorated already.
            os.environ.update(simulation.INTERPRETER_ENV)
        self._target: Target | None = None

    def probe(self) -> list[DeviceInfo]:
        simulated = simulation.devices(self.family)
        return simulated if simulated or simulation.refusal(self.family) else self.find_devices()

    def find_devices(self) -> list[DeviceInfo]:
        """The devices that are there, without creating a context; never raises."""
        raise NotImplementedError

    def open(self, index: int, config: OpenConfig) -> None:
        devices = self.probe()
        if index >= len(devices):
            raise BackendUnavailableError(f"{self.family} device {index} was asked for, {len(devices)} are here")
        device = devices[index]
        self._target = _target(device)
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(block_sizes=(16, 32, 64, 128), pinned_memory=False, transfer_kinds=("device",))

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        ops.load()
        target = _target(device)
        if target is None or target.family != self.family:
            known = ", ".join(simulation.archs(self.family))
            return Verdict.no(f"{device.arch} is none of the chips that the kernels are built for ({known})")
        return registry.verdict(op, target)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        ops.load()
        if self._target is None:
            raise UnsupportedError(op.describe(), "the device is not open", "open it first")
        return registry.bind(op, self._target)

    def memory(self) -> MemoryInfo:
        if self.device.type != "cpu":
            return super().memory()
        size = simulation.SIMULATED_MEMORY_BYTES
        return MemoryInfo(free=size, total=size, reserved=0, peak=0)


def _target(device: DeviceInfo) -> Target | None:
    if device.arch not in TARGETS:
        return None
    return interpreted(device.arch) if device.simulated else TARGETS[device.arch]
