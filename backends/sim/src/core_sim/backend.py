"""The simulated chip as a backend: the four methods, and the defaults that do not fit it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import (
    Arena,
    Backend,
    Batch,
    Capture,
    Graph,
    GroupSpec,
    KVLayout,
    Lens,
    MemoryInfo,
    OpenConfig,
    Pending,
    Plan,
    UnsupportedError,
    Verdict,
)
from core.backend.ops import AttentionOp, ExportBlocksOp, ImportBlocksOp, KvWriteOp, LinearOp, OpSpec, check_args
from core.spec import Capabilities, DeviceInfo, DType, KVCacheSpec
from core_sim.graphs import launch, record
from core_sim.kernels import BLOCK_SIZE, KERNELS, MAX_DECODE_QUERY, SimPlan, require, sim_layout

__all__ = ["SimBackend"]

_DTYPES = frozenset({DType.BFLOAT16, DType.FLOAT32})
_MAX_HEAD_DIM = 256
_MEMORY_BYTES = 2**29


class SimBackend(Backend):
    """A chip that exists only here. Everything is exact, late and unforgiving."""

    def probe(self) -> list[DeviceInfo]:
        name = "Simulated accelerator"
        return [DeviceInfo(index=0, arch="sim-1", memory_bytes=_MEMORY_BYTES, sdk="sim 1.0", name=name, simulated=True)]

    def open(self, index: int, config: OpenConfig) -> None:
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(block_sizes=(BLOCK_SIZE,), pinned_memory=False, transfer_kinds=("device",))

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        if op.name not in KERNELS:
            return Verdict.composite("the chip has no unit for it")
        if op.dtype not in _DTYPES:
            return Verdict.composite(f"the chip computes in bfloat16 and float32, not in {op.dtype.value}")
        reason = _refusal(op)
        if reason:
            return Verdict.no(reason) if op.name == "attention" else Verdict.composite(reason)
        if isinstance(op, AttentionOp):
            return Verdict.native(lens=Lens.HOST_EXACT, max_decode_q=MAX_DECODE_QUERY, capture=Capture.UNIFORM)
        return Verdict.native()

    def bind(self, op: OpSpec) -> Callable[..., Any]:
        verdict = self.supports(op, self.probe()[0])
        if verdict.kind != "NATIVE":
            raise UnsupportedError(op.describe(), f"sim: {verdict.reason}", "ask supports() first")
        kernel = KERNELS[op.name](op)

        def run(args: Any) -> Any:
            check_args(op, args)
            return launch(kernel, args)

        return run

    def memory(self) -> MemoryInfo:
        """A small memory, since all of what it hands out is written with NaN."""
        return MemoryInfo(free=_MEMORY_BYTES, total=_MEMORY_BYTES, reserved=0, peak=0)

    def arena(self, tag: str, reserve_bytes: int) -> Arena:
        """Memory as the chip hands it out: every float in it is NaN."""
        return Arena(torch.full((reserve_bytes,), 0xFF, dtype=torch.uint8), tag)

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        return sim_layout(spec, block_size)

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        """Host lists for the attention unit, checked as its driver would."""
        part = batch.groups[group.index]
        starts, lens = list(batch.query_start_loc_host), list(part.seq_lens_host)
        size = group.layout.block_size
        require(group.layout.canonical or size == BLOCK_SIZE, f"blocks have {BLOCK_SIZE} tokens, not {size}")
        require(part.host_exact and lens == part.seq_lens.tolist(), "the chip needs exact lengths on the host")
        require(starts == batch.query_start_loc.tolist(), "host and device disagree on the query offsets")
        for request in range(batch.num_decodes):
            length = starts[request + 1] - starts[request]
            require(
                length <= MAX_DECODE_QUERY, f"a decode request has {length} query tokens, at most {MAX_DECODE_QUERY}"
            )
        if into is None:
            into = SimPlan(batch=batch, group=part, spec=group, block_size=size)
        assert isinstance(into, SimPlan)
        into.batch, into.group = batch, part
        into.query_ends, into.kv_lens = starts[1:], lens
        return into

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        """Keeps the launches of one call, whose results are garbage until a replay."""
        return record(fn, plans)

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """The copy arrives when it is waited for; before that the host tensor holds garbage."""
        target = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        target.view(-1).view(torch.uint8).fill_(0xFF)  # NaN, or a wild integer
        return target, _LateCopy(tensor.clone(), target)


class _LateCopy(Pending):
    __slots__ = ("_source", "_target")

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source: Tensor | None = source
        self._target = target

    def done(self) -> bool:
        return self._source is None

    def wait(self) -> None:
        if self._source is not None:
            self._target.copy_(self._source)
            self._source = None


def _refusal(op: OpSpec) -> str:
    """Why the chip does not do `op`; empty where it does."""
    if isinstance(op, AttentionOp):
        return _attention_refusal(op)
    if isinstance(op, LinearOp) and op.scheme != "none":
        return f"no unit reads {op.scheme} weights"
    if op.name == "embed" and getattr(op, "scheme", "none") != "none":
        return "embeddings must be dense"
    if op.name == "act_mul" and getattr(op, "activation", "") != "silu":
        return "the vector unit has silu only"
    if isinstance(op, KvWriteOp) and (op.features or not op.v_head_dim or op.kv_dtype not in _DTYPES):
        return "the cache unit stores plain keys and values in bfloat16 and float32"
    if isinstance(op, ExportBlocksOp | ImportBlocksOp) and op.layout.canonical:
        return "the cache unit copies blocks of its own layout"
    return ""


def _attention_refusal(op: AttentionOp) -> str:
    if op.kv_dtype not in _DTYPES:
        return f"the attention unit reads bfloat16 and float32, not {op.kv_dtype.value}"
    if op.features:
        return f"the attention unit has no {', '.join(sorted(op.features))}"
    if op.softcap:
        return "the attention unit has no softcap"
    if not op.causal:
        return "the attention unit is causal"
    if max(op.head_dim, op.v_head_dim) > _MAX_HEAD_DIM:
        return f"heads of at most {_MAX_HEAD_DIM} elements"
    return ""
