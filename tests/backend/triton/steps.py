"""A step over a small paged cache, for kernels in the interpreter and for the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, Plan, canonical_layout
from core.backend.ops import OpSpec
from core.backend.reference import COMPOSITES
from core.spec import CacheKind, DType, KVCacheSpec
from core_triton import interpreter, registry
from core_triton.target import interpreted

__all__ = ["PAGE", "bound", "draw", "int32", "make_plan", "reference"]

PAGE = 16


def bound(op: OpSpec, arch: str = "sm_90") -> Callable[[Any], Any]:
    """The operation in the interpreter, as for that chip."""
    interpreter.install()
    return registry.bind(op, interpreted(arch))


def reference(op: OpSpec) -> Callable[[Any], Any]:
    """Its meaning in torch."""
    return COMPOSITES[op.name](op)


def int32(values: Any) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that depend on the shape and the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_plan(query_lens: Sequence[int], seq_lens: Sequence[int], **state: Any) -> Plan:
    """A plan whose requests own the blocks 1, 2, 3, ... one after the other.

    Args:
        state: Fields of `GroupBatch` for recurrent layers.
    """
    starts = [0, *accumulate(query_lens)]
    width = max(-(-length // PAGE) for length in seq_lens)
    table, following = [], 1
    for length in seq_lens:
        count = -(-length // PAGE)
        table.append([*range(following, following + count), *[0] * (width - count)])
        following += count
    positions = [s - q + i for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q)]
    rows = [row for row, count in enumerate(query_lens) for _ in range(count)]
    slots = [table[row][at // PAGE] * PAGE + at % PAGE for row, at in zip(rows, positions, strict=True)]
    group = GroupBatch(
        block_table=int32(table),
        slots=int32(slots),
        seq_lens=int32(list(seq_lens)),
        seq_lens_host=list(seq_lens),
        **state,
    )
    batch = Batch(
        num_reqs=len(query_lens),
        num_tokens=starts[-1],
        num_decodes=sum(count <= 1 for count in query_lens),
        max_query_len=max(query_lens),
        token_ids=int32([0] * starts[-1]),
        positions=int32(positions),
        query_start_loc=int32(starts),
        query_start_loc_host=starts,
        num_valid_tokens=int32([starts[-1]]),
        groups=(group,),
        logits_indices=int32([end - 1 for end in starts[1:]]),
    )
    spec = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=2, head_dim=32, v_head_dim=32, dtype=DType.FLOAT32)
    layout = canonical_layout(spec, PAGE)
    return Plan(batch=batch, group=group, spec=GroupSpec(index=0, layout=layout), block_size=PAGE)
