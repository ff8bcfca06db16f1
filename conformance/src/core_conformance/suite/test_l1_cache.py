"""L1: what `kv_write` stores and where; blocks in and out of a layout."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, KVSlab, Plan, torch_dtype
from core.backend.ops import (
    ImportBlocksArgs,
    ImportBlocksOp,
    KvWriteArgs,
    KvWriteOp,
    OpSpec,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    RmsNormOp,
    RopeOp,
)
from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import known
from core_conformance.operations.cache_memory import export, full_cache, int32, new_cache, require_blocks
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import DTYPES, norm_of, rope_table, rotated
from core_conformance.tolerance import pointwise_bound, unit_roundoff

_HEADS, _DIM = 2, 64
_BLOCKS = 6


def _write_op(dtype: DType) -> KvWriteOp:
    return KvWriteOp(dtype=dtype, num_kv_heads=_HEADS, head_dim=_DIM, v_head_dim=_DIM, kv_dtype=dtype)


def slots_batch(subject: Subject, slots: list[int]) -> Batch:
    """One request whose tokens go into those slots; what attention would need besides is there and unused."""
    put, count = subject.put, len(slots)
    width = -(-count // subject.block_size)
    group = GroupBatch(
        block_table=put(int32([[1 + i % (_BLOCKS - 1) for i in range(max(width, 1))]])),
        slots=put(int32(slots)),
        seq_lens=put(int32([count])),
        seq_lens_host=[count],
    )
    return Batch(
        num_reqs=1,
        num_tokens=count,
        num_decodes=int(count == 1),
        max_query_len=count,
        token_ids=put(int32([0] * count)),
        positions=put(int32(list(range(count)))),
        query_start_loc=put(int32([0, count])),
        query_start_loc_host=[0, count],
        num_valid_tokens=put(int32([count])),
        groups=(group,),
        logits_indices=put(int32([count - 1])),
    )


class _Cache:
    """A cache whose contents before the write are known: poison."""

    def __init__(self, subject: Subject, dtype: DType) -> None:
        self.subject = subject
        self.slab = new_cache(subject, full_cache(_HEADS, _DIM, dtype), subject.block_size, _BLOCKS, "large")
        self.before = self._planes()

    def _planes(self) -> tuple[Tensor, ...]:
        return export(self.subject, self.slab, range(_BLOCKS))

    def check(self, op: KvWriteOp | QkNormRopeWriteOp, slots: list[int], key: Tensor, value: Tensor) -> None:
        """The named slots hold key and value bit by bit, all others what they held."""
        for plane, old, new, what in zip(self._planes(), self.before, (key, value), ("key", "value"), strict=True):
            expected, last = old.clone(), old.clone()
            for token, slot in enumerate(slots):
                last[slot] = new[token]
                if slot >= 0:
                    expected[slot] = new[token]
            zero = expected.clone()
            for token, slot in enumerate(slots):
                if slot < 0:
                    zero[0] = new[token]
            suspects = known({"slot: -1 is written to slot 0": zero, "slot: -1 is written to the last slot": last})
            self.subject.equal(op, plane, expected, f"{what} by slot ", suspects=suspects)


def slots_of(subject: Subject) -> list[int]:
    """Out of order, over block boundaries, first and last slot of the pool's own blocks, some written nowhere."""
    size = subject.block_size
    return [size + 1, -1, 2 * size - 1, 2 * size, -1, size, _BLOCKS * size - 1, 3 * size + size // 2]


@check("L1/kv_write", DTYPES)
def test_tokens_go_where_their_slots_say(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Bit by bit; -1 is written nowhere; no other slot changes, block 0 included."""
    _write(subject, dice, variant, slots_of(subject))


@check("L1/kv_write/decode", DTYPES)
def test_a_single_token(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """One token, as a decode has it, with and without a slot."""
    for slots in ([2 * subject.block_size + 3], [-1]):
        _write(subject, dice, variant, slots)


@check("L1/kv_write/none", DTYPES)
def test_padding_alone_writes_nothing(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """All slots -1, and NaN in the rows."""
    _write(subject, dice, variant, [-1] * 5, fill=float("nan"))


@check("L1/kv_write/strided", DTYPES)
def test_views_of_a_fused_product(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Key and value are slices of one fused tensor; what lies beside them is NaN."""
    op, slots = _write_op(variant), slots_of(subject)
    write, cache = subject.bind(op), _Cache(subject, variant)
    width = _HEADS * _DIM
    fused = torch.randn(len(slots), 3 * width + 8, generator=dice).to(torch_dtype(variant))
    fused[:, :width], fused[:, 3 * width :] = float("nan"), float("nan")
    there = subject.put(fused)
    views = [
        x[:, begin : begin + width].unflatten(1, (_HEADS, _DIM)) for x in (there, fused) for begin in (width, 2 * width)
    ]
    plan = plan_of(subject, slots, cache.slab, op)
    write(KvWriteArgs(key=views[0], value=views[1], cache=cache.slab.views(), plan=plan))
    cache.check(op, slots, views[2], views[3])


@check("L1/qk_norm_rope_write", [f"{form}-{dtype}" for form in ("rope", "qk-norm") for dtype in DTYPES])
def test_the_coarse_write(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Norm of the heads, rope and cache write in one: results within their bounds, the cache equal to the results."""
    form, name = variant.rsplit("-", 1)
    dtype, slots = DTYPES[name], slots_of(subject)
    op = QkNormRopeWriteOp(
        dtype=dtype,
        num_heads=4,
        num_kv_heads=_HEADS,
        head_dim=_DIM,
        v_head_dim=_DIM,
        rotary_dim=_DIM,
        kv_dtype=dtype,
        eps=1e-6,
        features=frozenset({"qk_norm"} if form == "qk-norm" else ()),
    )
    write, cache = subject.bind(op), _Cache(subject, dtype)
    count, kind = len(slots), torch_dtype(dtype)
    query, key, value = (torch.randn(count, heads, _DIM, generator=dice).to(kind) for heads in (4, _HEADS, _HEADS))
    weights = [torch.randn(_DIM, generator=dice).to(kind) if op.features else None for _ in range(2)]
    positions, table = int32([(7 * i) % 64 for i in range(count)]), rope_table(64, _DIM)
    plan = plan_of(subject, slots, cache.slab, op)
    put = subject.put
    args = QkNormRopeWriteArgs(
        query=put(query),
        key=put(key),
        value=put(value),
        positions=put(positions),
        cos_sin=put(table),
        cache=cache.slab.views(),
        plan=plan,
        q_weight=None if weights[0] is None else put(weights[0]),
        k_weight=None if weights[1] is None else put(weights[1]),
    )
    got = write(args)
    for out, x, weight, what in zip(got, (query, key), weights, ("query", "key"), strict=True):
        _check_rotated(subject, op, out, x, weight, table[positions.long()], what)
    cache.check(op, slots, subject.get(got[1]), value)


def _check_rotated(
    subject: Subject, op: QkNormRopeWriteOp, out: Tensor, x: Tensor, weight: Tensor | None, angles: Tensor, what: str
) -> None:
    """Rope of the norm; the norm may have been rounded before the rotation or not."""
    slack: Tensor | float = 0.0
    values = x.double()
    rope = RopeOp(
        dtype=op.dtype, num_heads=4, num_kv_heads=2, head_dim=op.head_dim, rotary_dim=op.rotary_dim, interleaved=False
    )
    if weight is not None:
        values, _ = norm_of(RmsNormOp(dtype=op.dtype, dim=op.head_dim, eps=op.eps), x, weight)
        _, sizes = rotated(rope, values, angles)
        slack = 1.01 * unit_roundoff(x.dtype) * sizes
    exact, magnitude = rotated(rope, values, angles)
    subject.agree(op, out, exact, pointwise_bound(exact, magnitude, x.dtype, 32) + slack, what)


@check("L1/import_blocks", DTYPES)
def test_blocks_go_in_and_out_of_the_layout(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """import then export gives the same bits; blocks that were not named keep theirs."""
    subject.bind(_write_op(variant))
    cache = _Cache(subject, variant)
    op = ImportBlocksOp(dtype=variant, layout=cache.slab.layout)
    require_blocks(subject, op)
    ids, size = [4, 1], subject.block_size
    planes = tuple(
        torch.randn(len(ids) * size, _HEADS, _DIM, generator=dice).to(torch_dtype(variant)) for _ in range(2)
    )
    put = subject.put
    args = ImportBlocksArgs(
        cache=cache.slab.views(), block_ids=put(int32(ids)), planes=tuple(put(plane) for plane in planes)
    )
    subject.bind(op)(args)
    after = export(subject, cache.slab, range(_BLOCKS))
    for plane, old, new, what in zip(after, cache.before, planes, ("key", "value"), strict=True):
        expected = old.clone().unflatten(0, (_BLOCKS, size))
        expected[ids] = new.unflatten(0, (len(ids), size))
        subject.equal(op, plane, expected.flatten(0, 1), what)


def plan_of(subject: Subject, slots: list[int], slab: KVSlab, op: OpSpec) -> Plan:
    """The plan of a step whose tokens go into those slots of that cache."""
    group = GroupSpec(index=0, layout=slab.layout, ops=(op,))
    return subject.backend.plan(slots_batch(subject, slots), group)


def _write(subject: Subject, dice: torch.Generator, dtype: DType, slots: list[int], fill: float | None = None) -> None:
    op = _write_op(dtype)
    write, cache = subject.bind(op), _Cache(subject, dtype)
    key, value = (torch.randn(len(slots), _HEADS, _DIM, generator=dice).to(torch_dtype(dtype)) for _ in range(2))
    if fill is not None:
        key.fill_(fill), value.fill_(fill)
    plan = plan_of(subject, slots, cache.slab, op)
    write(KvWriteArgs(key=subject.put(key), value=subject.put(value), cache=cache.slab.views(), plan=plan))
    cache.check(op, slots, key, value)
