"""L1: adapters, moved tokens, and blocks in and out of a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.backend import KVSlab, torch_dtype
from core.backend.ops import (
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    KvWriteOp,
    LoraAddArgs,
    LoraAddOp,
    MoveTokensArgs,
    MoveTokensOp,
)
from core.spec import CacheKind, DType, KVCacheSpec
from core_conformance.checks import check
from core_conformance.diagnosis import known
from core_conformance.operations.cache_memory import export, full_cache, int32, latent_cache, new_cache, require_blocks
from core_conformance.operations.paged import stored_values
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import DTYPES, normal
from core_conformance.tolerance import COMPOSITE_RATIO, U_ACC, unit_roundoff

_BLOCKS = 5
_CACHES: dict[str, KVCacheSpec] = {
    **{name: full_cache(2, 32, dtype) for name, dtype in DTYPES.items()},
    "e4m3": full_cache(2, 32, DType.FLOAT8_E4M3FN),
    "int8": full_cache(2, 32, DType.INT8),
    "other-values": full_cache(2, 32, DType.BFLOAT16, v_head_dim=48),
    "latent": latent_cache(CacheKind.MLA, 80, DType.BFLOAT16),
}


def _filled(subject: Subject, spec: KVCacheSpec) -> tuple[KVSlab, tuple[Tensor, ...]]:
    """A cache of known contents, brought in block by block, and the contents token by token."""
    fields: dict[str, Any] = {
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
    }
    model_dtype = spec.dtype if spec.dtype in DTYPES.values() else DType.BFLOAT16
    subject.bind(KvWriteOp(dtype=model_dtype, kv_dtype=spec.dtype, **fields))  # no cache that nobody can write
    slab = new_cache(subject, spec, subject.block_size, _BLOCKS, "nan")
    op = ImportBlocksOp(dtype=spec.dtype, layout=slab.layout)
    draw, count = torch.Generator().manual_seed(7), _BLOCKS * subject.block_size
    dims = [spec.head_dim, *([spec.v_head_dim] if spec.v_head_dim else [])]
    planes = tuple(stored_values(spec.dtype, draw, count, spec.num_kv_heads, dim) for dim in dims)
    put = subject.put
    args = ImportBlocksArgs(
        cache=slab.views(), block_ids=put(int32(list(range(_BLOCKS)))), planes=tuple(put(plane) for plane in planes)
    )
    require_blocks(subject, op)(args)
    return slab, planes


@check("L1/export_blocks", _CACHES)
def test_blocks_come_out_in_the_order_asked_for(subject: Subject, variant: KVCacheSpec) -> None:
    """Token-major, bit by bit: blocks out of order, one of them twice, and none at all."""
    slab, planes = _filled(subject, variant)
    op, size = ExportBlocksOp(dtype=variant.dtype, layout=slab.layout), subject.block_size
    for ids in ([3, 1, 3], [4], []):
        args = ExportBlocksArgs(cache=slab.views(), block_ids=subject.put(int32(ids)))
        out = require_blocks(subject, op)(args)
        for plane, got, what in zip(planes, out, ("key", "value"), strict=False):
            expected = plane.unflatten(0, (_BLOCKS, size))[ids].flatten(0, 1)
            subject.equal(op, got, expected, f"{what} of blocks {ids} ")


@check("L1/move_tokens", _CACHES)
def test_all_reads_come_before_any_write(subject: Subject, variant: KVCacheSpec) -> None:
    """Pairs that form a chain and a swap, over block boundaries; -1 skips a pair; all other slots keep their bits."""
    slab, planes = _filled(subject, variant)
    size = subject.block_size
    op = MoveTokensOp(dtype=variant.dtype, layout=slab.layout)
    move = subject.bind(op)
    pairs = [(size, size + 1), (size + 1, 2 * size), (2 * size, 3 * size - 1), (-1, 5), (7, 8), (8, 7), (2, 2)]
    source, target = (int32([pair[side] for pair in pairs]) for side in (0, 1))
    put = subject.put
    move(MoveTokensArgs(cache=slab.views(), source_slots=put(source), target_slots=put(target)))
    _check_moved(subject, op, slab, planes, pairs)


@check("L1/move_tokens/none", DTYPES)
def test_nothing_to_move(subject: Subject, variant: DType) -> None:
    """No pair at all, and pairs that are all skipped: nothing changes."""
    slab, planes = _filled(subject, full_cache(2, 32, variant))
    op = MoveTokensOp(dtype=variant, layout=slab.layout)
    move, put = subject.bind(op), subject.put
    for sources in ([], [-1, -1]):
        targets = int32(list(range(3, 3 + len(sources))))
        move(MoveTokensArgs(cache=slab.views(), source_slots=put(int32(sources)), target_slots=put(targets)))
        _check_moved(subject, op, slab, planes, [])


def _check_moved(
    subject: Subject, op: MoveTokensOp, slab: KVSlab, planes: tuple[Tensor, ...], pairs: list[tuple[int, int]]
) -> None:
    for before, after, what in zip(planes, export(subject, slab, range(_BLOCKS)), ("key", "value"), strict=False):
        expected, chained, last = before.clone(), before.clone(), before.clone()
        for source, target in pairs:
            last[target] = before[source]
            if source >= 0:
                expected[target] = before[source]
                chained[target] = chained[source].clone()
        suspects = known(
            {
                "order: a pair reads what a pair before it wrote": chained.double(),
                "slot: source -1 is read from the last slot": last.double(),
            }
        )
        subject.equal(op, after, expected, f"{what} by slot ", suspects=suspects)


@check("L1/lora_add_", DTYPES)
def test_adapters_are_added(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Several adapters in one batch, one of them unused, rows without one bit by bit as they were; no token."""
    op = LoraAddOp(dtype=variant, in_features=48, out_features=40, rank=5, num_adapters=3)
    add, put = subject.bind(op), subject.put
    for ids in ([2, -1, 0, 0, -1, 2, 2], [-1, -1], []):
        y, x = normal(dice, variant, len(ids), 40), normal(dice, variant, len(ids), 48)
        a, b = normal(dice, variant, 3, 5, 48, spread=0.2), normal(dice, variant, 3, 40, 5)
        there = put(y)
        add(LoraAddArgs(y=there, x=put(x), a=put(a), b=put(b), adapter_ids=put(int32(ids))))
        exact, plain = _lora(y, x, a, b, ids, torch.float64), _lora(y, x, a, b, ids, torch.float32)
        untouched = torch.tensor([adapter < 0 for adapter in ids], dtype=torch.bool)
        out = subject.get(there)
        subject.equal(op, out[untouched], y[untouched], "rows without an adapter")
        measured = float((plain.double() - exact).abs().max()) if len(ids) else 0.0
        bound = unit_roundoff(y.dtype) * exact.abs() + COMPOSITE_RATIO * measured + 256 * U_ACC * exact.abs()
        suspects = known(
            {
                "adapter: -1 is taken for the last one": _lora(y, x, a, b, [i % 3 for i in ids], torch.float64),
                "adapter: -1 is taken for adapter 0": _lora(y, x, a, b, [max(i, 0) for i in ids], torch.float64),
                "sum: y is overwritten and not added to": exact - y.double(),
            }
        )
        subject.agree(op, out, exact, bound, "y", suspects=suspects)


def _lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: list[int], dtype: torch.dtype) -> Tensor:
    """y + B A x; in float32 the inner product is rounded to the model's type, as two products in a row do."""
    rows = [row.to(dtype) for row in y]
    for token, adapter in enumerate(ids):
        if adapter >= 0:
            inner = a[adapter].to(dtype) @ x[token].to(dtype)
            inner = inner.to(y.dtype).to(dtype) if dtype is torch.float32 else inner
            rows[token] = rows[token] + b[adapter].to(dtype) @ inner
    return torch.stack(rows) if rows else y.to(dtype)


@check("L1/lora_add_/which", DTYPES)
def test_each_token_shows_its_adapter(subject: Subject, variant: DType) -> None:
    """Adapter i adds 8 ** i in rank 1 to zeros: the result names the adapter, exactly."""
    op = LoraAddOp(dtype=variant, in_features=16, out_features=24, rank=2, num_adapters=4)
    ids, dtype, put = [3, 0, -1, 1, 2, 0], torch_dtype(variant), subject.put
    a, b = torch.zeros(4, 2, 16), torch.zeros(4, 24, 2)
    a[:, 1, 5], b[:, :, 1] = 1.0, (8.0 ** torch.arange(4))[:, None]
    x = torch.zeros(len(ids), 16)
    x[:, 5] = 1.0
    y = put(torch.zeros(len(ids), 24, dtype=dtype))
    args = LoraAddArgs(y=y, x=put(x.to(dtype)), a=put(a.to(dtype)), b=put(b.to(dtype)), adapter_ids=put(int32(ids)))
    subject.bind(op)(args)
    exact = torch.tensor([8.0**i if i >= 0 else 0.0 for i in ids], dtype=torch.float64)[:, None].expand(-1, 24)
    subject.agree(op, y, exact, 0.0, "(numbers of the adapters) y")
