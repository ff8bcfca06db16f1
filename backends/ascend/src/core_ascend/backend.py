"""Ascend NPUs as a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import (
    Arena,
    Backend,
    BackendUnavailableError,
    Batch,
    CommLimits,
    Communicator,
    Graph,
    GroupSpec,
    KVLayout,
    MemoryInfo,
    OpenConfig,
    Packed,
    Pending,
    Plan,
    Role,
    Scheme,
    SingleRank,
    TorchCommunicator,
    UnsupportedError,
    Verdict,
    WeightSource,
)
from core.backend.ops import OpSpec
from core.spec import Capabilities, DeviceInfo, KVCacheSpec
from core_ascend import graphs, machine, operations, rules, weights
from core_ascend.chips import CHIPS, Chip, chip_named, unsupported_chip
from core_ascend.device import Device, Npu
from core_ascend.layouts import ascend_layout
from core_ascend.plan import ascend_plan

__all__ = ["AscendBackend"]

logger = logging.getLogger("core.backends.ascend")


class AscendBackend(Backend):
    """910B, 910C and 310P through torch_npu; simulated ones over CPU numerics behind the same calls."""

    _device: Device | None = None
    _info: DeviceInfo | None = None
    _asked: DeviceInfo | None = None

    def probe(self) -> list[DeviceInfo]:
        """From device nodes, driver files and `npu-smi`; makes no context. Warns of what keeps devices from use."""
        reason = machine.problem()
        if reason:
            logger.warning("%s", reason)
        return machine.devices()

    def open(self, index: int, config: OpenConfig) -> None:
        """Takes the device, or its simulation.

        Raises:
            BackendUnavailableError: there is none of that index, or torch_npu cannot take it.
        """
        found = machine.devices()
        if index >= len(found):
            raise BackendUnavailableError(f"no NPU of index {index}; {machine.problem() or 'see `npu-smi info`'}")
        self._info = found[index]
        chip = self._chip()
        self._device = _simulated(chip) if found[index].simulated else Npu(index)
        self.device = self._device.device
        self.capabilities = Capabilities(
            block_sizes=chip.block_sizes,
            pinned_memory=self._device.pinned,
            transfer_kinds=("device",),
            alignment=512,
        )

    def close(self) -> None:
        """Forgets the device; torch_npu keeps its context for the process."""
        self._device = None

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        """By the chip's table and the documented bounds of the calls."""
        chip = chip_named(device.arch)
        # `kv_layout` is not told of which device: before `open` it is the one that was asked about.
        self._asked = device
        return Verdict.no(unsupported_chip(device.arch)) if chip is None else rules.verdict(op, chip)

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        assert self._info is not None, "open() comes before bind()"
        answer = self.supports(op, self._info)
        if answer.kind != "NATIVE":
            raise UnsupportedError(op.describe(), f"ascend: {answer.reason}", "ask supports() first")
        return operations.make(op, self._chip())

    def memory(self) -> MemoryInfo:
        return self._opened().memory()

    def reset_peak(self) -> None:
        self._opened().reset_peak()

    def arena(self, tag: str, reserve_bytes: int) -> Arena:
        """Zeros: padding requests read the null block, and what they read must be finite."""
        return Arena(torch.zeros(reserve_bytes, dtype=torch.uint8, device=self.device), tag)

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        """Canonical planes for most caches; two planes for latent ones, fractals on 310P."""
        return ascend_layout(spec, block_size, self._chip())

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        """Transposed, and in fractals for linear layers; embeddings, and schemes without a call, as they are."""
        if not weights.has_call(source, scheme.name, role, dtype, self._chip()):
            return super().pack(source, scheme, role, dtype)
        return weights.pack(source, scheme.name, role, dtype, self.device)

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        """Exact host lists for the attention calls, and where tokens are written."""
        return ascend_plan(batch, group, into)

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        """A graph of the device; each replay hands over the host lists of its plans."""
        return graphs.capture(self._opened(), fn, plans)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Into page-locked memory, in stream order."""
        return self._opened().to_host(tensor)

    def fence(self) -> Pending:
        return self._opened().fence()

    def comm(self, ranks: Sequence[int], tag: str, limits: CommLimits) -> Communicator:
        """Collectives over HCCL."""
        if len(ranks) == 1:
            return SingleRank()
        return TorchCommunicator(self._opened().new_group(ranks, tag))

    def _opened(self) -> Device:
        assert self._device is not None, "open() comes first"
        return self._device

    def _chip(self) -> Chip:
        """The chip that is open, else the one that was asked about, else the first of the machine."""
        info = self._info or self._asked or next(iter(machine.devices()), None)
        chip = chip_named(info.arch) if info else None
        return chip or CHIPS[0]


def _simulated(chip: Chip) -> Device:
    from core_ascend.simulation import open_simulated

    return open_simulated(chip)
