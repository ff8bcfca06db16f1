"""The CPU as a backend: C++ kernels chosen at run time for the processor, torch for the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.backend import (
    Backend,
    Batch,
    Capture,
    CommLimits,
    Communicator,
    Graph,
    GroupSpec,
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
    SingleRank,
    TorchCommunicator,
    UnsupportedError,
    Verdict,
    WeightSource,
    canonical_layout,
    torch_dtype,
)
from core.backend.ops import (
    AttentionOp,
    Determinism,
    EmbedOp,
    ExportBlocksOp,
    ImportBlocksOp,
    KvWriteOp,
    LinearOp,
    MoveTokensOp,
    OpSpec,
    QkNormRopeWriteOp,
    ReduceNormOp,
    SampleOp,
)
from core.spec import CacheKind, Capabilities, DeviceInfo, DType, KVCacheSpec
from core_cpu import kernels
from core_cpu.blocks import CpuLayout, cpu_layout
from core_cpu.operations import KERNELS, activation_format
from core_cpu.plan import cpu_plan
from core_cpu.recording import record
from core_cpu.tape_memory import TapeMemory
from core_cpu.weights import KERNEL_SCHEMES, pack

__all__ = ["CpuBackend"]

_DTYPES = frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16})
_MAX_HEAD_DIM = 512
_BLOCK_SIZES = (16, 32, 64, 128)
_UNRECORDED = frozenset({"export_blocks", "import_blocks", "move_tokens"})
"""Operations that ask torch to prepare their indices."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class CpuBackend(Backend):
    """Every x86-64 level from one build; other processors get the portable kernels."""

    _tape_memory: TapeMemory | None = None

    def probe(self) -> list[DeviceInfo]:
        """The processor, as one device."""
        return [
            DeviceInfo(
                index=0,
                arch=f"{platform.machine()}-{kernels.isa()}",
                memory_bytes=_total_memory(),
                sdk=f"kernels {kernels.isa()}",
                name=_processor(),
            )
        ]

    def open(self, index: int, config: OpenConfig) -> None:
        """Sets the compute threads: the operator's, else OMP_NUM_THREADS, else the cores that this process may use."""
        self.device = torch.device("cpu")
        kernels.set_num_threads(config.num_threads)
        self.capabilities = Capabilities(
            block_sizes=_BLOCK_SIZES, unified_memory=True, transfer_kinds=("host",), num_threads=kernels.num_threads()
        )

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        """NATIVE for what the kernels do, by its static parameters; the rest is COMPOSITE, which no tape can keep."""
        reason = _refusal(op) if op.name in KERNELS else "no kernel for it"
        if reason:
            return Verdict(kind=Kind.COMPOSITE, reason=reason, capture=Capture.NEVER)
        capture = Capture.NEVER if op.name in _UNRECORDED or op.has("ragged") else Capture.ANY
        determinism = max(Determinism.D1, op.determinism)
        return Verdict.native(determinism=determinism, capture=capture, activation_format=activation_format(op))

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        verdict = self.supports(op, self.probe()[0])
        if verdict.kind != "NATIVE":
            raise UnsupportedError(op.describe(), f"cpu: {verdict.reason}", "ask supports() first")
        return KERNELS[op.name](op)

    def memory(self) -> MemoryInfo:
        """The host's memory, cut to what a container allows."""
        host = super().memory()
        total = _total_memory()
        free = min(host.free, total)
        status = Path("/proc/self/status").read_text(encoding="ascii")
        peak = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")]
        return MemoryInfo(free=free, total=total, reserved=0, peak=peak[0] if peak else 0)

    def reset_peak(self) -> None:
        """Starts the peak anew where the kernel allows it."""
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return  # not allowed in some containers; the peak then covers the whole life of the process

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        """Keys and values in panels as the attention kernel reads them; other caches stay canonical."""
        attention = spec.kind in (CacheKind.FULL, CacheKind.SLIDING)
        if not attention or not spec.v_head_dim or spec.dtype not in _DTYPES or spec.head_dim % 2:
            return canonical_layout(spec, block_size)
        return cpu_layout(spec, block_size)

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        """Panels for matrices; experts and types without kernels stay as they are."""
        known = scheme.name in KERNEL_SCHEMES or (scheme.name == "none" and dtype in map(torch_dtype, _DTYPES))
        if role == "experts" or not known:
            return super().pack(source, scheme, role, dtype)
        return pack(source, scheme.name, dtype)

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        """Addresses of the step's tensors, once for all layers."""
        return cpu_plan(batch, group, into)

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        """Keeps the kernel calls of `fn` and runs none; a replay runs them in one call, outside of the GIL."""
        if self._tape_memory is None:
            self._tape_memory = TapeMemory()
        return record(fn, plans, self._tape_memory)

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        """Whole blocks by memcpy."""
        assert src.layout.id == dst.layout.id, f"{src.layout.id} is not {dst.layout.id}"
        after.wait()
        for source, target in zip(src.views(), dst.views(), strict=True):
            kernels.copy_blocks(source, target, list(pairs))
        return Pending()

    def comm(self, ranks: Sequence[int], tag: str, limits: CommLimits) -> Communicator:
        """Collectives over gloo, whatever transport the world was initialised with."""
        if len(ranks) == 1:
            return SingleRank()
        group = dist.new_group(list(ranks), backend="gloo", group_desc=tag)
        assert isinstance(group, dist.ProcessGroup)
        return TorchCommunicator(group)


def _refusal(op: OpSpec) -> str:
    """Why no kernel does `op`; empty where one does."""
    if op.dtype not in _DTYPES:
        return f"kernels compute in float32, bfloat16 and float16, not in {op.dtype.value}"
    check = _CHECKS.get(type(op))
    return check(op) if check else ""


def _attention_refusal(op: AttentionOp) -> str:
    if op.has("scales"):
        return "caches have no scales"
    if not op.has("ragged") and op.kv_dtype not in _DTYPES:
        return f"caches are float32, bfloat16 or float16, not {op.kv_dtype.value}"
    return _head_refusal(op.head_dim, op.v_head_dim)


def _write_refusal(op: KvWriteOp | QkNormRopeWriteOp) -> str:
    if op.has("scales"):
        return "caches have no scales"
    if op.kv_dtype not in _DTYPES:
        return f"caches are float32, bfloat16 or float16, not {op.kv_dtype.value}"
    return _head_refusal(op.head_dim, op.v_head_dim)


def _head_refusal(head_dim: int, v_head_dim: int) -> str:
    if not v_head_dim:
        return "caches hold keys and values"
    if head_dim % 2 or max(head_dim, v_head_dim) > _MAX_HEAD_DIM:
        return f"heads have an even number of elements, at most {_MAX_HEAD_DIM}"
    return ""


def _linear_refusal(op: LinearOp) -> str:
    if op.out_dtype not in _DTYPES:
        return f"results are float32, bfloat16 or float16, not {op.out_dtype.value}"
    if op.scheme == "none":
        return "" if op.weight_dtype in _DTYPES else f"no kernel for weights in {op.weight_dtype.value}"
    return "" if op.scheme in KERNEL_SCHEMES else f"no kernel for {op.scheme} weights"


def _embed_refusal(op: EmbedOp) -> str:
    return "" if op.scheme == "none" or op.scheme in KERNEL_SCHEMES else f"no kernel for {op.scheme} weights"


def _reduce_refusal(op: ReduceNormOp) -> str:
    return "its sum over ranks is the communicator's" if op.world > 1 or op.scatter or op.out_formats else ""


def _block_refusal(op: ExportBlocksOp | ImportBlocksOp | MoveTokensOp) -> str:
    return "" if isinstance(op.layout, CpuLayout) else f"the layout {op.layout.id!r} is torch's to handle"


def _sample_refusal(op: SampleOp) -> str:
    return "" if op.dtype is DType.FLOAT32 else "logits are float32"


_CHECKS: dict[type[OpSpec], Callable[[Any], str]] = {
    AttentionOp: _attention_refusal,
    KvWriteOp: _write_refusal,
    QkNormRopeWriteOp: _write_refusal,
    LinearOp: _linear_refusal,
    EmbedOp: _embed_refusal,
    ReduceNormOp: _reduce_refusal,
    SampleOp: _sample_refusal,
    ExportBlocksOp: _block_refusal,
    ImportBlocksOp: _block_refusal,
    MoveTokensOp: _block_refusal,
}


def _total_memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdecimal():
            total = min(total, int(limit))
    return total


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
