"""Builds small steps over a paged cache in which everything that a request does not own is NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, KVSlab, Plan, canonical_layout, torch_dtype
from core.spec import CacheKind, DType, KVCacheSpec


def i32(values: Sequence[object] | int) -> Tensor:
    """An int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def kv_spec(num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: DType = DType.FLOAT64) -> KVCacheSpec:
    """A full cache's wish."""
    kind = CacheKind.FULL if v_head_dim else CacheKind.MLA
    return KVCacheSpec(kind=kind, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)


def make_plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    spec: KVCacheSpec | None = None,
    block_size: int = 4,
    tables: Sequence[Sequence[int]] = (),
    slots: Sequence[int] = (),
    exact: bool = True,
    padding_tokens: int = 0,
    state_slots: Tensor | None = None,
    num_accepted: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Plan:
    """A plan of one group; hosts lengths are loose bounds where not `exact`."""
    starts = [0]
    for count in query_lens:
        starts.append(starts[-1] + count)
    total = starts[-1] + padding_tokens
    width = max((len(row) for row in tables), default=1)
    table = [list(row) + [0] * (width - len(row)) for row in tables] or [[0]] * len(query_lens)
    group = GroupBatch(
        block_table=i32(table),
        slots=i32(list(slots) or [-1] * total),
        seq_lens=i32(list(seq_lens)),
        seq_lens_host=list(seq_lens) if exact else [length + 3 for length in seq_lens],
        host_exact=exact,
        state_slots=state_slots,
        num_accepted=num_accepted,
        checkpoint_slots=checkpoint_slots,
    )
    positions = [s - q + i for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q)] + [0] * padding_tokens
    batch = Batch(
        num_reqs=len(query_lens),
        num_tokens=total,
        num_decodes=0,
        max_query_len=max(query_lens, default=0),
        token_ids=i32([0] * total),
        positions=i32(positions),
        query_start_loc=i32(starts),
        query_start_loc_host=starts,
        num_valid_tokens=i32([starts[-1]]),
        groups=(group,),
        logits_indices=i32([end - 1 for end in starts[1:]]),
    )
    layout = canonical_layout(spec or kv_spec(1, 1, 1), block_size)
    return Plan(batch=batch, group=group, spec=GroupSpec(index=0, layout=layout), block_size=block_size)


class PagedStep:
    """One step with its cache: blocks in shuffled order, NaN wherever no request keeps a token.

    Args:
        query_lens: Tokens of each request in the step.
        seq_lens: Keys of each request, the step's included.
        spec: The cache.
        window: Blocks that fell out of it are null in the block table.
        padding: Padding requests of one token at the end, as a replayed graph has them.
        exact: Whether the host knows exact lengths.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        spec: KVCacheSpec,
        *,
        block_size: int = 4,
        window: int = 0,
        padding: int = 0,
        exact: bool = True,
        seed: int = 0,
    ) -> None:
        self.query_lens, self.seq_lens = list(query_lens), list(seq_lens)
        self.block_size, self.num_padding = block_size, padding
        needed = [-(-length // block_size) for length in seq_lens]
        self.num_blocks = sum(needed) + 3
        free = list(range(1, self.num_blocks))
        random.Random(seed).shuffle(free)
        self.owned = [[free.pop() for _ in range(count)] for count in needed]
        layout = canonical_layout(spec, block_size)
        memory = torch.zeros(self.num_blocks * layout.block_bytes, dtype=torch.uint8)
        self.cache = KVSlab(tensor=memory, layout=layout, num_blocks=self.num_blocks).views()
        for plane in self.cache:
            plane.copy_(torch.full(plane.shape, float("nan"), dtype=torch.float64))
        self.plan = self._plan(spec, window, exact)

    def _plan(self, spec: KVCacheSpec, window: int, exact: bool) -> Plan:
        tables, slots = [], []
        for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            slots += [self.slot(row, position) for position in range(length - count, length)]
            first = max(0, length - count - window + 1) if window else 0
            kept = [block if (i + 1) * self.block_size > first else 0 for i, block in enumerate(self.owned[row])]
            tables.append(kept)
        tables += [[0]] * self.num_padding
        slots += [-1] * self.num_padding
        return make_plan(
            self.query_lens + [1] * self.num_padding,
            self.seq_lens + [1] * self.num_padding,
            spec=spec,
            block_size=self.block_size,
            tables=tables,
            slots=slots,
            exact=exact,
        )

    def slot(self, row: int, position: int) -> int:
        """Where a request keeps a position."""
        return self.owned[row][position // self.block_size] * self.block_size + position % self.block_size

    def store(self, plane: int, row: int, values: Tensor, first: int = 0) -> None:
        """Puts values [n, heads, dim] into the slots of positions [first, first + n)."""
        flat = self.cache[plane].flatten(0, 1)
        for offset, value in enumerate(values):
            flat[self.slot(row, first + offset)] = value.to(flat.dtype)

    def spans(self) -> list[tuple[int, int]]:
        """[start, end) of each real request's tokens."""
        starts = self.plan.batch.query_start_loc_host
        return [(starts[row], starts[row + 1]) for row in range(len(self.query_lens))]

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.plan.batch.num_tokens


def dtype_of(dtype: DType) -> torch.dtype:
    """The torch dtype."""
    return torch_dtype(dtype)
