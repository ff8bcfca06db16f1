"""Steps over a paged cache, on the device and for the oracle: blocks in shuffled order, poison wherever nobody owns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, Kind, KVSlab, Plan, canonical_layout, torch_dtype
from core.backend.ops import (
    AttentionArgs,
    AttentionOp,
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksOp,
    KvWriteArgs,
    KvWriteOp,
    LayerCache,
    OpSpec,
)
from core.spec import CacheKind, DType, KVCacheSpec
from core_conformance.subject import Mismatch, Subject, oracle

__all__ = [
    "POISONS",
    "PagedStep",
    "Poison",
    "export",
    "full_cache",
    "int32",
    "new_cache",
    "poison_byte",
    "require_blocks",
]

Poison = Literal["nan", "large"]
POISONS: tuple[Poison, ...] = ("nan", "large")


def int32(values: Sequence[object]) -> Tensor:
    """An int32 tensor on the host."""
    return torch.tensor(values, dtype=torch.int32)


def poison_byte(poison: Poison, dtype: DType) -> int:
    """The byte that, repeated, is NaN or a large finite number in `dtype`."""
    if poison == "nan":
        return 0xFF
    return 0x7B if dtype is DType.FLOAT16 else 0x7E


def new_cache(subject: Subject, spec: KVCacheSpec, block_size: int, num_blocks: int, poison: Poison) -> KVSlab:
    """One layer's cache on the device in the backend's own layout, every byte of it poison."""
    layout = subject.backend.kv_layout(spec, block_size)
    memory = subject.backend.arena("kv", num_blocks * layout.block_bytes).tensor
    memory.fill_(poison_byte(poison, spec.dtype))
    return KVSlab(tensor=memory, layout=layout, num_blocks=num_blocks)


@dataclass(frozen=True)
class _Work:
    """What of a request is in a batch: `count` tokens that end at key `length`."""

    count: int
    length: int


class PagedStep:
    """Requests with a cache, of which a step computes the last tokens.

    Requests must come with the fewest query tokens first, as the core packs them.

    Args:
        subject: The backend.
        op: The attention that will read the cache.
        query_lens: Tokens of each request in the step; 0 is allowed.
        seq_lens: Keys of each request, those of the step included.
        poison: What unowned memory holds.
        padding: Requests of padding behind the others: one token, null block, slot -1.
        seed: Of the order of blocks and of keys and values.
    """

    def __init__(
        self,
        subject: Subject,
        op: AttentionOp,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        poison: Poison = "nan",
        padding: int = 0,
        block_size: int | None = None,
        seed: int = 0,
    ) -> None:
        assert list(query_lens) == sorted(query_lens), "requests with the fewest tokens come first"
        self.subject, self.op, self.poison = subject, op, poison
        self.block_size = block_size or subject.block_size
        self.query_lens, self.seq_lens, self.padding = list(query_lens), list(seq_lens), padding
        self.spec = op.cache_spec
        self.deal_blocks(seed)
        draw = torch.Generator().manual_seed(seed)
        dtype = torch_dtype(op.kv_dtype)
        heads = op.num_kv_heads
        self.keys = [torch.randn(n, heads, op.head_dim, generator=draw).to(dtype) for n in seq_lens]
        self.values = [torch.randn(n, heads, op.v_head_dim, generator=draw).to(dtype) for n in seq_lens]
        self.query = torch.randn(self.num_tokens, op.num_heads, op.head_dim, generator=draw).to(torch_dtype(op.dtype))

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

    def slot(self, row: int, position: int) -> int:
        """Where a request keeps a position; -1 where its block fell out of the window."""
        block = self.tables[row][position // self.block_size]
        return block * self.block_size + position % self.block_size if block else -1

    def _kept(self, row: int, blocks: Sequence[int]) -> list[int]:
        """The request's blocks, null where no query of the step reaches."""
        window = self.op.window
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
        return GroupSpec(index=0, layout=layout, ops=(self.op, *ops))

    def plan(self, into: Plan | None = None) -> Plan:
        """The device's plan of the step."""
        return self.subject.backend.plan(self.batch(on_device=True), self.group_spec(), into)

    def filled_cache(self) -> LayerCache:
        """A poisoned cache on the device into which `kv_write` has put every key and value that is still owned."""
        slab = new_cache(self.subject, self.spec, self.block_size, self.num_blocks, self.poison)
        cache = slab.views()
        write = self.subject.bind(self.write_op)
        for row in range(
            len(self.seq_lens)
        ):  # one request a step, so that no step is larger than the device was told of
            plan = self.subject.backend.plan(self._row_batch(row), self.group_spec(self.write_op))
            put = self.subject.put
            write(KvWriteArgs(key=put(self.keys[row]), value=put(self.values[row]), cache=cache, plan=plan))
        return cache

    def _row_batch(self, row: int) -> Batch:
        alone = PagedStep.__new__(PagedStep)
        alone.__dict__.update(self.__dict__)
        alone.tables, alone.query_lens, alone.seq_lens = [self.tables[row]], [self.seq_lens[row]], [self.seq_lens[row]]
        return alone._batch([_Work(self.seq_lens[row], self.seq_lens[row])], 0, on_device=True)

    @property
    def write_op(self) -> KvWriteOp:
        """The operation that fills the cache."""
        return KvWriteOp(
            dtype=self.op.kv_dtype,
            num_kv_heads=self.op.num_kv_heads,
            head_dim=self.op.head_dim,
            v_head_dim=self.op.v_head_dim,
            kv_dtype=self.op.kv_dtype,
        )

    def run(self, *, lse: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """The device's attention of the step."""
        attend = self.subject.bind(self.op)
        cache = self.filled_cache()
        args = AttentionArgs(query=self.device_query(), cache=cache, plan=self.plan(), lse=lse, sinks=sinks)
        out: Tensor = attend(args)
        return out

    def device_query(self) -> Tensor:
        """The queries on the device; rows of padding are NaN."""
        query = self.query.clone()
        if self.padding:
            query[self.real.stop :] = float("nan")
        return self.subject.put(query)

    # -- the oracle --------------------------------------------------------------------------------------------------

    def host_cache(self) -> LayerCache:
        """The same cache on the host in the canonical layout."""
        layout = canonical_layout(self.spec, self.block_size)
        memory = torch.full((self.num_blocks * layout.block_bytes,), 0xFF, dtype=torch.uint8)
        planes = KVSlab(tensor=memory, layout=layout, num_blocks=self.num_blocks).views()
        for row, length in enumerate(self.seq_lens):
            slots = torch.tensor([self.slot(row, position) for position in range(length)], dtype=torch.int64)
            kept = slots >= 0
            for plane, tokens in zip(planes, (self.keys[row], self.values[row]), strict=True):
                plane.flatten(0, 1)[slots[kept]] = tokens[kept]
        return planes

    def host_plan(self) -> Plan:
        """The step's plan for the reference."""
        batch = self.batch(on_device=False)
        spec = GroupSpec(index=0, layout=canonical_layout(self.spec, self.block_size), ops=(self.op,))
        return Plan(batch=batch, group=batch.groups[0], spec=spec, block_size=self.block_size)

    def exact(self, op: AttentionOp, *, lse: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
        """The reference's answer in the types of `op` (float64 for the oracle)."""
        query = self.query.to(torch_dtype(op.dtype))
        args = AttentionArgs(query=query, cache=self.host_cache(), plan=self.host_plan(), lse=lse, sinks=sinks)
        out: Tensor = oracle(op)(args)
        return out


def export(subject: Subject, slab: KVSlab, block_ids: Sequence[int]) -> tuple[Tensor, ...]:
    """Blocks in the canonical token-major form, on the host."""
    op = ExportBlocksOp(dtype=slab.layout.planes[0].dtype, layout=slab.layout)
    require_blocks(subject, op)
    out = subject.bind(op)(ExportBlocksArgs(cache=slab.views(), block_ids=subject.put(int32(list(block_ids)))))
    return tuple(subject.get(plane) for plane in out)


def require_blocks(subject: Subject, op: ExportBlocksOp | ImportBlocksOp) -> None:
    """Asserts that blocks can be brought out of, or into, the backend's layout; a private layout owes that.

    Raises:
        Mismatch: the layout is private and the backend has no such operation.
    """
    if subject.binder.resolve(op).kind is Kind.NO:
        raise Mismatch(
            f"the KV layout {op.layout.id!r} is private and {op.name} is not NATIVE: nobody can say what the cache "
            "holds, and its blocks cannot go to another device; bind export_blocks and import_blocks, or keep the "
            "canonical layout"
        )


def full_cache(num_kv_heads: int, head_dim: int, dtype: DType, v_head_dim: int | None = None) -> KVCacheSpec:
    """A cache without a window."""
    value_dim = head_dim if v_head_dim is None else v_head_dim
    return KVCacheSpec(
        kind=CacheKind.FULL, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=value_dim, dtype=dtype
    )
