"""The step's lengths and tables as the kernels take them: looked up once a step, not once a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, Plan
from core_cpu import _kernels

__all__ = ["CpuPlan", "cpu_plan"]


@dataclass(slots=True, kw_only=True)
class CpuPlan(Plan):
    """A plan with the addresses of its tensors, which it keeps alive.

    Args:
        handle: Storage of fixed address that the kernels read, and recorded ones read again at each replay.
        num_slots: Slots of the step.
    """

    handle: Any = field(default_factory=_kernels.Plan)
    num_slots: int = 0


def cpu_plan(batch: Batch, group: GroupSpec, into: Plan | None) -> CpuPlan:
    """The plan of a step for one group; `into` is refreshed in place."""
    part = batch.groups[group.index]
    if into is None:
        into = CpuPlan(batch=batch, group=part, spec=group, block_size=group.layout.block_size)
    assert isinstance(into, CpuPlan), "the plan was not made by this backend"
    into.batch, into.group = batch, part
    into.num_slots = part.slots.shape[0]
    into.handle.set(
        *_requests(batch, part), _int32(part.slots), into.num_slots, batch.num_tokens, _int32(batch.num_valid_tokens)
    )
    return into


def _requests(batch: Batch, part: GroupBatch) -> tuple[int, int, int, int, int]:
    table = part.block_table
    assert table.dtype == torch.int32 and (table.shape[1] <= 1 or table.stride(1) == 1)
    count = part.seq_lens.shape[0]
    assert batch.query_start_loc.shape[0] == count + 1 and table.shape[0] >= count
    return count, _int32(batch.query_start_loc), _int32(part.seq_lens), table.data_ptr(), table.stride(0)


def _int32(x: Tensor) -> int:
    assert x.dtype == torch.int32 and x.is_contiguous(), f"int32 and contiguous, not {x.dtype} {x.stride()}"
    return x.data_ptr()
