"""What the backends over these kernels share: a real GPU through torch, or a simulated one on host tensors."""

from __future__ import annotations

import abc
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from core.backend import (
    Backend,
    BackendUnavailableError,
    CommLimits,
    Communicator,
    Graph,
    Kind,
    KVLayout,
    KVSlab,
    MemoryInfo,
    OpenConfig,
    Packed,
    Pending,
    Plan,
    Role,
    Scheme,
    TorchCommunicator,
    UnsupportedError,
    Verdict,
    WeightSource,
)
from core.backend.ops import OpSpec
from core.spec import CacheKind, Capabilities, DeviceInfo, DType, KVCacheSpec
from core_triton import interpreter, ops, registry, simulation
from core_triton.gpu import Gpu
from core_triton.packing import suited
from core_triton.probing import Found
from core_triton.simulated_graphs import record
from core_triton.target import TARGETS, Target, interpreted

__all__ = ["BLOCK_SIZES", "TritonBackend"]

logger = logging.getLogger("core_triton")

BLOCK_SIZES = (16, 32, 64, 128)
"""Tokens a KV block that the kernels take."""
_FP8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2})

_COLLECTIVE = frozenset({"dispatch", "combine"})


class TritonBackend(Backend):
    """A GPU whose operations are the Triton kernels of this package.

    A backend names its family and looks at its driver. A simulated device has host tensors and the interpreter: the
    same verdicts, tuning, launches and recorded steps, and nothing of a driver.
    """

    family: ClassVar[simulation.Family]
    """Triton's word for the driver."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._gpu: Gpu | None = None

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens a KV block that the kernels take, the preferred one first."""
        return BLOCK_SIZES

    @abc.abstractmethod
    def look(self) -> Found:
        """The devices that are there, without creating a context. Never raises."""

    def probe(self) -> list[DeviceInfo]:
        simulated, wrong = simulation.devices(self.family), simulation.refusal(self.family)
        if simulated:
            return simulated
        found = Found(passed_over=(wrong,)) if wrong else self.look()
        for reason in found.passed_over:
            logger.warning("%s", reason)
        return list(found.devices)

    def open(self, index: int, config: OpenConfig) -> None:
        simulated = simulation.devices(self.family)
        if simulated:
            self._open_simulated(simulated[index])
        else:
            self._open_gpu(index)

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        self._gpu = self._target = None

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        target = _target(device)
        if target is None or target.family != self.family:
            known = ", ".join(simulation.archs(self.family))
            return Verdict.no(f"{device.arch} is none of the chips that the kernels are built for ({known})")
        _load_kernels(device.simulated)
        if op.name in _COLLECTIVE:
            return Verdict.composite("collectives, with copies around them: there is nothing for a kernel to do")
        verdict = registry.verdict(op, target)
        if verdict.kind is Kind.COMPOSITE and getattr(op, "kv_dtype", None) in _FP8:
            # Nobody has such a cache without having asked for it: it is refused, and not made slow.
            return Verdict.no(f"{verdict.reason}; choose another type of cache, or another device")
        return verdict

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        if self._target is None:
            raise UnsupportedError(op.describe(), "the device is not open", "open it first")
        return self.launched(registry.bind(op, self._target))

    def launched(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`run` with this device as the thread's current one, where there is a choice."""
        return run if self._gpu is None else self._gpu.guarded(run)

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        packed = super().pack(source, scheme, role, dtype)
        return packed if self._target is None else suited(packed, self._target)

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        """The canonical layout, in which prefix caches and composites are at home.

        Raises:
            UnsupportedError: the kernels do not take such blocks.
        """
        # A block of a STATE cache is a slot, of one state.
        if spec.kind is not CacheKind.STATE and block_size not in self.block_sizes:
            raise UnsupportedError(
                "kv_cache",
                f"the kernels take blocks of {', '.join(map(str, self.block_sizes))} tokens, not of {block_size}",
                "give another --block-size, or none",
            )
        return super().kv_layout(spec, block_size)

    def memory(self) -> MemoryInfo:
        """On a simulated device the memory that it is said to have, so that the pool of KV blocks stays small."""
        if self._gpu is not None:
            return super().memory()
        size = simulation.SIMULATED_MEMORY_BYTES
        return MemoryInfo(free=size, total=size, reserved=0, peak=0)

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        """A CUDA or HIP graph; on a simulated device the launches and torch calls of one call of `fn`."""
        return record(fn, plans) if self._gpu is None else self._gpu.capture(fn)

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        return super().to_device(src, dst) if self._gpu is None else self._gpu.to_device(src, dst)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        return super().to_host(tensor) if self._gpu is None else self._gpu.to_host(tensor)

    def fence(self) -> Pending:
        return super().fence() if self._gpu is None else self._gpu.fence()

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        if self._gpu is None:
            return super().copy_blocks(src, dst, pairs, after)
        return self._gpu.copy_blocks(src, dst, pairs, after)

    def comm(self, ranks: Sequence[int], tag: str, limits: CommLimits) -> Communicator:
        """Over NCCL, which ROCm builds of torch have as RCCL, whatever the world was initialised with."""
        if self._gpu is None or len(ranks) == 1:
            return super().comm(ranks, tag, limits)
        group = dist.new_group(list(ranks), backend="nccl", group_desc=tag)
        assert isinstance(group, dist.ProcessGroup)
        return TorchCommunicator(group)

    def _open_simulated(self, device: DeviceInfo) -> None:
        _load_kernels(simulated=True)
        self._target = interpreted(device.arch)
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(block_sizes=self.block_sizes, transfer_kinds=("device",))

    def _open_gpu(self, index: int) -> None:
        found = self.look()
        if index >= len(found.devices):
            why = "; ".join(found.passed_over) or "see `core backends`"
            raise BackendUnavailableError(f"{len(found.devices)} GPU(s) can be opened, not number {index}: {why}")
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise BackendUnavailableError("TRITON_INTERPRET=1 is set, with which no kernel reaches a GPU; unset it")
        _load_kernels(simulated=False)
        arch, ordinal = found.devices[index].arch, found.ordinals[index]
        try:
            torch.cuda.init()
            seen = _arch_of(torch.cuda.get_device_properties(ordinal))
            if seen != arch:
                raise BackendUnavailableError(
                    f"device {ordinal} is {arch} for the driver and {seen} for torch: they count in different orders; "
                    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
                )
            self._gpu = Gpu(ordinal)
        except (RuntimeError, AssertionError) as error:
            line = str(error).splitlines()[0]
            raise BackendUnavailableError(
                f"torch cannot take GPU {ordinal} ({line}); check that driver and torch fit, and that nobody else "
                "has the device for itself"
            ) from error
        self._target = TARGETS[arch]
        self.device = self._gpu.device
        self.capabilities = Capabilities(
            block_sizes=self.block_sizes, pinned_memory=True, alignment=256, transfer_kinds=("device", "host")
        )


def _load_kernels(simulated: bool) -> None:
    """Decorates the kernels, once in the life of a process: for chips, or for the interpreter."""
    if simulated:
        interpreter.install()
    ops.load()


def _target(device: DeviceInfo) -> Target | None:
    if device.arch not in TARGETS:
        return None
    return interpreted(device.arch) if device.simulated else TARGETS[device.arch]


def _arch_of(properties: Any) -> str:
    """The vendor's word for what torch sees."""
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"
