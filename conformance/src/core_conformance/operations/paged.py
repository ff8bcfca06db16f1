"""Steps over a paged cache, on the device and for the oracle: blocks in shuffled order, poison wherever nobody owns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, KVSlab, Plan, canonical_layout, torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, KvWriteArgs, KvWriteOp, LayerCache, OpSpec
from core.spec import DType, KVCacheSpec
from core_conformance.diagnosis import Places
from core_conformance.operations.cache_memory import Poison, int32, new_cache
from core_conformance.subject import Subject, oracle

__all__ = ["PagedCache", "PagedStep", "stored_values"]


@dataclass(frozen=True)
class _Work:
    """What of a request is in a batch: `count` tokens that end at key `length`."""

    count: int
    length: int


def stored_values(dtype: DType, draw: torch.Generator, *shape: int) -> Tensor:
    """Random contents of a cache: normal numbers, or the whole range of int8."""
    if dtype is DType.INT8:
        return torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8)
    return torch.randn(*shape, generator=draw).to(torch_dtype(dtype))


class PagedCache:
    """Requests that keep something of each token in blocks, and a step that computes the last tokens of each.

    Requests must come with the fewest query tokens first, as the core packs them.

    Args:
        subject: The backend.
        spec: What is kept.
        ops: The operations that will read it.
        query_lens: Tokens of each request in the step; 0 is allowed.
        seq_lens: Keys of each request, those of the step included.
        poison: What unowned memory holds.
        padding: Requests of padding behind the others: one token, null block, slot -1.
        block_size: Tokens a block; the backend's first choice by default.
        seed: Of the order of blocks and of contents.
        scales: Of keys and values, [1] or [num_kv_heads]: powers of two, so that what is written can be said exactly.
    """

    def __init__(
        self,
        subject: Subject,
        spec: KVCacheSpec,
        ops: tuple[OpSpec, ...],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        poison: Poison = "nan",
        padding: int = 0,
        block_size: int | None = None,
        seed: int = 0,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert list(query_lens) == sorted(query_lens), "requests with the fewest tokens come first"
        self.subject, self.spec, self.ops, self.poison, self.scales = subject, spec, ops, poison, scales
        self.block_size = block_size or subject.block_size
        self.query_lens, self.seq_lens, self.padding = list(query_lens), list(seq_lens), padding
        self.deal_blocks(seed)
        self.draw = torch.Generator().manual_seed(seed)
        heads, kind = spec.num_kv_heads, spec.dtype
        self.keys = [stored_values(kind, self.draw, n, heads, spec.head_dim) for n in seq_lens]
        self.values = [stored_values(kind, self.draw, n, heads, spec.v_head_dim) for n in seq_lens]

    def deal_blocks(self, seed: int) -> None:
        """Gives the requests other blocks, in an order that depends on the seed."""
        needed = [-(-length // self.block_size) for length in self.seq_lens]
        self.num_blocks = sum(needed) + 3
        free = list(range(1, self.num_blocks))
        random.Random(seed).shuffle(free)
        owned = [[free.pop() for _ in range(count)] for count in needed]
        self.tables = [self._kept(row, blocks) for row, blocks in enumerate(owned)]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return sum(self.query_lens) + self.padding

    @property
    def real(self) -> slice:
        """Tokens that are no padding."""
        return slice(0, sum(self.query_lens))

    @property
    def queries(self) -> list[tuple[int, int]]:
        """(request, position) of each token that is no padding."""
        pairs = []
        for row, (count, length) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            pairs += [(row, position) for position in range(length - count, length)]
        return pairs

    @property
    def places(self) -> Places:
        """The same for a diagnosis."""
        requests, positions = zip(*self.queries, strict=True) if self.queries else ((), ())
        return Places(requests=requests, positions=positions, block_size=self.block_size, window=self.spec.window)

    def slot(self, row: int, position: int) -> int:
        """Where a request keeps a position; -1 where its block fell out of the window."""
        block = self.tables[row][position // self.block_size]
        return block * self.block_size + position % self.block_size if block else -1

    def _kept(self, row: int, blocks: Sequence[int]) -> list[int]:
        """The request's blocks, null where no query of the step reaches."""
        window = self.spec.window
        first = max(0, self.seq_lens[row] - self.query_lens[row] - window + 1) if window else 0
        return [block if (i + 1) * self.block_size > first else 0 for i, block in enumerate(blocks)]

    # -- batches -----------------------------------------------------------------------------------------------------

    def batch(self, *, on_device: bool) -> Batch:
        """The step itself."""
        work = [_Work(q, s) for q, s in zip(self.query_lens, self.seq_lens, strict=True)]
        return self._batch(work, self.padding, on_device)

    def _batch(self, work: Sequence[_Work], padding: int, on_device: bool) -> Batch:
        move = self.subject.put if on_device else torch.clone
        starts, slots = [0], []
        positions: list[int] = []
        for row, item in enumerate(work):
            at = range(item.length - item.count, item.length)
            positions += at
            slots += [self.slot(row, position) for position in at]
            starts.append(starts[-1] + item.count)
        num_valid = starts[-1]
        starts += [num_valid + i + 1 for i in range(padding)]
        lens = [item.length for item in work] + [1] * padding
        group = GroupBatch(
            block_table=move(int32(self._tables(work, padding))),
            slots=move(int32(slots + [-1] * padding)),
            seq_lens=move(int32(lens)),
            seq_lens_host=lens,
        )
        counts = [item.count for item in work] + [1] * padding
        return Batch(
            num_reqs=len(lens),
            num_tokens=starts[-1],
            num_decodes=sum(count <= 1 for count in counts),
            max_query_len=max(counts),
            token_ids=move(int32([0] * starts[-1])),
            positions=move(int32([*positions, *[0] * padding])),
            query_start_loc=move(int32(starts)),
            query_start_loc_host=starts,
            num_valid_tokens=move(int32([num_valid])),
            groups=(group,),
            logits_indices=move(int32([max(end - 1, 0) for end in starts[1:]])),
        )

    def _tables(self, work: Sequence[_Work], padding: int) -> list[list[int]]:
        width = max((len(blocks) for blocks in self.tables), default=1) or 1
        rows = [self.tables[row][: -(-item.length // self.block_size)] for row, item in enumerate(work)]
        return [row + [0] * (width - len(row)) for row in rows] + [[0] * width] * padding

    # -- the device --------------------------------------------------------------------------------------------------

    def group_spec(self, *ops: OpSpec) -> GroupSpec:
        """What the device's plans must serve."""
        layout = self.subject.backend.kv_layout(self.spec, self.block_size)
        return GroupSpec(index=0, layout=layout, ops=(*self.ops, *ops))

    def plan(self, into: Plan | None = None) -> Plan:
        """The device's plan of the step."""
        return self.subject.backend.plan(self.batch(on_device=True), self.group_spec(), into)

    def filled_cache(self) -> LayerCache:
        """A poisoned cache on the device into which `kv_write` has put every key and value that is still owned."""
        slab = new_cache(self.subject, self.spec, self.block_size, self.num_blocks, self.poison)
        cache, put = slab.views(), self.subject.put
        write = self.subject.bind(self.write_op)
        fields: dict[str, Any] = {}
        if self.scales is not None:
            fields = {"k_scale": put(self.scales[0]), "v_scale": put(self.scales[1])}
        # One request a step, so that no step is larger than the device was told of.
        for row in range(len(self.seq_lens)):
            plan = self.subject.backend.plan(self._row_batch(row), self.group_spec(self.write_op))
            key, value = (put(self._fed(x[row], at)) for at, x in enumerate((self.keys, self.values)))
            args = KvWriteArgs(key=key, value=value if self.spec.v_head_dim else None, cache=cache, plan=plan, **fields)
            write(args)
        return cache

    def _fed(self, stored: Tensor, plane: int) -> Tensor:
        """What must be written so that `stored` is kept, exactly."""
        dtype = torch_dtype(self.write_op.dtype)
        scale = torch.ones(1) if self.scales is None else self.scales[plane]
        return (stored.to(torch.float32) * scale.view(-1, 1)).to(dtype)

    def _row_batch(self, row: int) -> Batch:
        alone = PagedCache.__new__(PagedCache)
        alone.__dict__.update(self.__dict__)
        alone.tables, alone.query_lens, alone.seq_lens = [self.tables[row]], [self.seq_lens[row]], [self.seq_lens[row]]
        return alone._batch([_Work(self.seq_lens[row], self.seq_lens[row])], 0, on_device=True)

    @property
    def write_op(self) -> KvWriteOp:
        """The operation that fills the cache."""
        return KvWriteOp(
            dtype=self.ops[0].dtype,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            v_head_dim=self.spec.v_head_dim,
            kv_dtype=self.spec.dtype,
            features=frozenset() if self.scales is None else frozenset({"scales"}),
        )

    # -- the oracle --------------------------------------------------------------------------------------------------

    def host_cache(self) -> LayerCache:
        """The same cache on the host in the canonical layout."""
        layout = canonical_layout(self.spec, self.block_size)
        memory = torch.full((self.num_blocks * layout.block_bytes,), 0xFF, dtype=torch.uint8)
        planes = KVSlab(tensor=memory, layout=layout, num_blocks=self.num_blocks).views()
        for row, length in enumerate(self.seq_lens):
            slots = torch.tensor([self.slot(row, position) for position in range(length)], dtype=torch.int64)
            kept = slots >= 0
            for plane, tokens in zip(planes, (self.keys[row], self.values[row]), strict=False):
                plane.view(torch.uint8).flatten(0, 1)[slots[kept]] = tokens[kept].view(torch.uint8)
        return planes

    def host_plan(self) -> Plan:
        """The step's plan for the reference."""
        batch = self.batch(on_device=False)
        spec = GroupSpec(index=0, layout=canonical_layout(self.spec, self.block_size), ops=self.ops)
        return Plan(batch=batch, group=batch.groups[0], spec=spec, block_size=self.block_size)


class PagedStep(PagedCache):
    """A step of attention over such a cache.

    Args:
        subject: The backend.
        op: The attention.
        query_lens: As in `PagedCache`.
        seq_lens: As in `PagedCache`.
        options: As in `PagedCache`.
    """

    def __init__(
        self, subject: Subject, op: AttentionOp, query_lens: Sequence[int], seq_lens: Sequence[int], **options: Any
    ) -> None:
        super().__init__(subject, op.cache_spec, (op,), query_lens, seq_lens, **options)
        self.op = op
        shape = (self.num_tokens, op.num_heads, op.head_dim)
        self.query = torch.randn(*shape, generator=self.draw).to(torch_dtype(op.dtype))

    def run(self, *, lse: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """The device's attention of the step."""
        attend = self.subject.bind(self.op)
        scales: dict[str, Any] = {}
        if self.scales is not None:
            scales = dict(zip(("k_scale", "v_scale"), map(self.subject.put, self.scales), strict=True))
        cache = self.filled_cache()
        args = AttentionArgs(query=self.device_query(), cache=cache, plan=self.plan(), lse=lse, sinks=sinks, **scales)
        out: Tensor = attend(args)
        return out

    def device_query(self) -> Tensor:
        """The queries on the device; rows of padding are NaN."""
        query = self.query.clone()
        if self.padding:
            query[self.real.stop :] = float("nan")
        return self.subject.put(query)

    def exact(self, op: AttentionOp, *, lse: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """The reference's answer in the types of `op` (float64 for the oracle)."""
        query = self.query.to(torch_dtype(op.dtype))
        scales: dict[str, Any] = {}
        if self.scales is not None:
            scales = dict(zip(("k_scale", "v_scale"), self.scales, strict=True))
        args = AttentionArgs(
            query=query, cache=self.host_cache(), plan=self.host_plan(), lse=lse, sinks=sinks, **scales
        )
        out: Tensor = oracle(op)(args)
        return out
