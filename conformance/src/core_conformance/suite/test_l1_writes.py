"""L1: caches that keep another type than the model's, and the forms of the coarse write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import KvWriteArgs, KvWriteOp, QkNormRopeWriteArgs, QkNormRopeWriteOp, RmsNormOp, RopeOp
from core.spec import CacheKind, DType, KVCacheSpec
from core_conformance.checks import check
from core_conformance.diagnosis import known
from core_conformance.operations.cache_memory import export, full_cache, int32, latent_cache, new_cache
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_attention_features import KV8
from core_conformance.suite.test_l1_cache import plan_of, slots_of
from core_conformance.suite.test_l1_dense import DTYPES, norm_of, normal, rope_table, rotated
from core_conformance.tolerance import pointwise_bound, unit_roundoff

_BLOCKS = 6
_SCALES: dict[str, tuple[list[float], list[float]]] = {
    "plain": ([1.0], [1.0]),
    "one": ([0.25], [2.0]),
    "heads": ([0.25, 8.0], [0.5, 2.0]),
}
"""Powers of two: dividing by them and multiplying by what they are the inverse of are the same."""


def _check_rows(
    subject: Subject, op: Any, slab: Any, before: tuple[Tensor, ...], slots: list[int], rows: list[Tensor], **names: Any
) -> None:
    """Named slots hold their rows bit by bit, all others what they held."""
    after = export(subject, slab, range(_BLOCKS))
    for plane, old, new, what in zip(after, before, rows, ("key", "value"), strict=False):
        expected = old.clone()
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[token]
        subject.equal(op, plane, expected, f"{what} by slot ", suspects=names.get("suspects"))


def _stored(x: Tensor, scales: list[float], dtype: DType) -> Tensor:
    """x / scale rounded to nearest, ties to even; what does not fit becomes the largest value of its sign."""
    values = x.double() / torch.tensor(scales, dtype=torch.float64).view(-1, 1)
    if dtype is DType.INT8:
        return values.round().clamp(-128, 127).to(torch.int8)
    kind = torch_dtype(dtype)
    limit = torch.finfo(kind).max
    return values.clamp(-limit, limit).float().to(kind)


@check("L1/kv_write/kv8", [f"{kv}-{form}-{dtype}" for kv in KV8 for form in _SCALES for dtype in DTYPES])
def test_caches_of_eight_bits(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Divided by the scale, rounded to nearest and even, saturated; bit by bit, for one scale and for one a head."""
    kv, form, name = variant.split("-")
    dtype, kv_dtype = DTYPES[name], KV8[kv]
    features = frozenset() if form == "plain" else frozenset({"scales"})
    op = KvWriteOp(dtype=dtype, num_kv_heads=2, head_dim=32, v_head_dim=32, kv_dtype=kv_dtype, features=features)
    write, slots = subject.bind(op), slots_of(subject)
    slab = new_cache(subject, full_cache(2, 32, kv_dtype), subject.block_size, _BLOCKS, "large")
    before = export(subject, slab, range(_BLOCKS))
    spread = 30.0 if kv == "int8" else 1.0
    key, value = (normal(dice, dtype, len(slots), 2, 32, spread=spread) for _ in range(2))
    key[0, 0, :4] = torch.tensor([6e4, -6e4, 0.5, -1.5]).to(key.dtype)  # beyond every type, and ties
    put, scales = subject.put, _SCALES[form]
    tensors: dict[str, Any] = {}
    if features:
        tensors = {name: put(torch.tensor(s)) for name, s in zip(("k_scale", "v_scale"), scales, strict=True)}
    args = KvWriteArgs(
        key=put(key), value=put(value), cache=slab.views(), plan=plan_of(subject, slots, slab, op), **tensors
    )
    write(args)
    rows = [_stored(x, s, kv_dtype) for x, s in zip((key, value), scales, strict=True)]
    _check_rows(subject, op, slab, before, slots, rows)


@check("L1/kv_write/latent", {**DTYPES, "e4m3": DType.FLOAT8_E4M3FN})
def test_a_cache_of_one_plane(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Latent and index caches have no values."""
    dtype = DType.BFLOAT16 if variant is DType.FLOAT8_E4M3FN else variant
    op = KvWriteOp(dtype=dtype, num_kv_heads=1, head_dim=80, v_head_dim=0, kv_dtype=variant)
    write, slots = subject.bind(op), slots_of(subject)
    slab = new_cache(subject, latent_cache(CacheKind.MLA, 80, variant), subject.block_size, _BLOCKS, "large")
    before = export(subject, slab, range(_BLOCKS))
    key = normal(dice, dtype, len(slots), 1, 80)
    args = KvWriteArgs(key=subject.put(key), value=None, cache=slab.views(), plan=plan_of(subject, slots, slab, op))
    write(args)
    _check_rows(subject, op, slab, before, slots, [_stored(key, [1.0], variant) if dtype != variant else key])


@check("L1/kv_write/order", DTYPES)
def test_each_element_has_its_place(subject: Subject, variant: DType) -> None:
    """Values that name their head and column: a layout that mixes them up says how."""
    op = KvWriteOp(dtype=variant, num_kv_heads=2, head_dim=32, v_head_dim=48, kv_dtype=variant)
    write, slots = subject.bind(op), slots_of(subject)
    slab = new_cache(subject, full_cache(2, 32, variant, v_head_dim=48), subject.block_size, _BLOCKS, "large")
    before = export(subject, slab, range(_BLOCKS))
    kind = torch_dtype(variant)
    rows = [
        (torch.arange(2)[:, None] * 64 + torch.arange(dim)).to(kind).expand(len(slots), 2, dim).contiguous()
        for dim in (32, 48)
    ]
    put = subject.put
    args = KvWriteArgs(key=put(rows[0]), value=put(rows[1]), cache=slab.views(), plan=plan_of(subject, slots, slab, op))
    write(args)
    _check_rows(subject, op, slab, before, slots, rows)


_COARSE: dict[str, dict[str, Any]] = {
    "pairs": {"interleaved": True},
    "partial": {"rotary_dim": 16},
    "no-rope": {"rotary_dim": 0},
    "qk-norm-offset": {"features": frozenset({"qk_norm"}), "weight_offset": 1.0, "eps": 1e-3},
    "other-values": {"v_head_dim": 48},
}


@check("L1/qk_norm_rope_write/form", [f"{form}-{dtype}" for form in _COARSE for dtype in DTYPES])
def test_forms_of_the_coarse_write(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Pairs beside each other, part of a head rotated or none, norms with an offset, values of another size."""
    form, name = variant.rsplit("-", 1)
    dtype = DTYPES[name]
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32, "rotary_dim": 32}
    op = QkNormRopeWriteOp(dtype=dtype, kv_dtype=dtype, **(fields | _COARSE[form]))
    write, slots, put = subject.bind(op), slots_of(subject), subject.put
    spec: KVCacheSpec = full_cache(2, 32, dtype, v_head_dim=op.v_head_dim)
    slab = new_cache(subject, spec, subject.block_size, _BLOCKS, "large")
    before = export(subject, slab, range(_BLOCKS))
    query, key = (normal(dice, dtype, len(slots), heads, 32) for heads in (4, 2))
    value = normal(dice, dtype, len(slots), 2, op.v_head_dim)
    weights = [normal(dice, dtype, 32) if op.has("qk_norm") else None for _ in range(2)]
    positions, table = int32([(7 * i) % 64 for i in range(len(slots))]), rope_table(64, max(op.rotary_dim, 2))
    args = QkNormRopeWriteArgs(
        query=put(query),
        key=put(key),
        value=put(value),
        positions=put(positions),
        cos_sin=put(table[:, : op.rotary_dim].contiguous()),
        cache=slab.views(),
        plan=plan_of(subject, slots, slab, op),
        q_weight=None if weights[0] is None else put(weights[0]),
        k_weight=None if weights[1] is None else put(weights[1]),
    )
    got = write(args)
    for out, x, weight, what in zip(got, (query, key), weights, ("query", "key"), strict=True):
        _check_turned(subject, op, out, x, weight, table[positions.long()], what)
    _check_rows(subject, op, slab, before, slots, [subject.get(got[1]), value])


def _check_turned(
    subject: Subject, op: QkNormRopeWriteOp, out: Tensor, x: Tensor, weight: Tensor | None, angles: Tensor, what: str
) -> None:
    rope = RopeOp(
        dtype=op.dtype, num_heads=4, num_kv_heads=2, head_dim=op.head_dim, rotary_dim=op.rotary_dim,
        interleaved=op.interleaved,
    )  # fmt: skip
    values, slack = x.double(), torch.zeros(1, dtype=torch.float64)
    if weight is not None:
        norm = RmsNormOp(dtype=op.dtype, dim=op.head_dim, eps=op.eps, weight_offset=op.weight_offset)
        values, _ = norm_of(norm, x, weight)
        _, sizes = _turned(rope, values, angles)
        slack = 1.01 * unit_roundoff(x.dtype) * sizes
    exact, magnitude = _turned(rope, values, angles)
    bound = pointwise_bound(exact, magnitude, x.dtype, 32) + slack
    suspects = known({"nothing written: it is not rotated at all": values} if op.rotary_dim else {})
    subject.agree(op, out, exact, bound, what, suspects=suspects)


def _turned(rope: RopeOp, values: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    if not rope.rotary_dim:
        return values.double(), values.double().abs()
    return rotated(rope, values, angles)
