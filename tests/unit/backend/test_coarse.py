"""Coarse operations of the reference equal their parts, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bare import binder, bound
from paged import PagedStep, kv_spec
from test_experts import Recorded
from torch import Tensor

from core.backend import Quantized
from core.backend.ops import (
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    ReduceNormArgs,
    ReduceNormOp,
)
from core.spec import DType

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 6


def norm(x: Tensor, weight: Tensor, offset: float = 0.0, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + offset)


def turned(x: Tensor, table: Tensor, positions: Tensor, rotary: int) -> Tensor:
    half = rotary // 2
    row = table[positions.long()].double()[:, None]
    a, b = x[..., :half], x[..., half:rotary]
    cos, sin = row[..., :half], row[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary:]), -1)


def qk_op(**changes: Any) -> QkNormRopeWriteOp:
    fields: dict[str, Any] = {
        "dtype": DType.FLOAT64,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "v_head_dim": V_DIM,
        "rotary_dim": DIM,
        "kv_dtype": DType.FLOAT64,
    }
    return QkNormRopeWriteOp(**(fields | changes))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
def test_qk_norm_rope_write(rotary_dim: int, normed: bool) -> None:
    step = PagedStep([1, 4], [6, 4], kv_spec(KV_HEADS, DIM, V_DIM), padding=1)
    query = torch.randn(6, HEADS, DIM, dtype=torch.float64)
    key, value = torch.randn(6, KV_HEADS, DIM).double(), torch.randn(6, KV_HEADS, V_DIM).double()
    q_weight, k_weight, table = torch.randn(DIM).double(), torch.randn(DIM).double(), torch.randn(32, rotary_dim)
    op = qk_op(rotary_dim=rotary_dim, features=frozenset({"qk_norm"} if normed else ()), weight_offset=1.0, eps=0.01)
    positions = step.plan.batch.positions
    got_query, got_key = bound(op)(
        QkNormRopeWriteArgs(
            query=query.clone(),
            key=key.clone(),
            value=value,
            positions=positions,
            cos_sin=table,
            cache=step.cache,
            plan=step.plan,
            q_weight=q_weight if normed else None,
            k_weight=k_weight if normed else None,
        )
    )
    if normed:
        query, key = norm(query, q_weight, 1.0, 0.01), norm(key, k_weight, 1.0, 0.01)
    if rotary_dim:
        query, key = (turned(x, table, positions, rotary_dim) for x in (query, key))
    torch.testing.assert_close(got_query, query, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_key, key, rtol=1e-12, atol=1e-12)
    slots = step.plan.slots[:5].long()
    torch.testing.assert_close(step.cache[0].flatten(0, 1)[slots], key[:5], rtol=1e-12, atol=1e-12)
    assert torch.equal(step.cache[1].flatten(0, 1)[slots], value[:5])
    assert step.cache[0].isnan().sum() == step.cache[0].numel() - 5 * KV_HEADS * DIM


@pytest.mark.parametrize(
    ("op", "names"),
    [
        (qk_op(), ["rope", "kv_write"]),
        (qk_op(rotary_dim=0), ["kv_write"]),
        (qk_op(features=frozenset({"qk_norm"})), ["rms_norm", "rms_norm", "rope", "kv_write"]),
        (ReduceNormOp(dtype=DType.FLOAT32, dim=4, eps=1e-6), ["rms_norm"]),
        (ReduceNormOp(dtype=DType.FLOAT32, dim=4, eps=1e-6, features=frozenset({"post_norm"})), ["rms_norm"] * 2),
    ],
)
def test_parts_are_declared(op: Any, names: list[str]) -> None:
    row = binder().resolve(op)
    assert [part.op.name for part in row.parts] == names
    assert all(part.op.dtype is op.dtype and part.op.determinism is op.determinism for part in row.parts)


@pytest.mark.parametrize("post", [False, True])
def test_reduce_norm_on_one_rank(post: bool) -> None:
    partial, residual = torch.randn(5, 8).double(), torch.randn(5, 8).double()
    weight, post_weight = torch.randn(8).double(), torch.randn(8).double()
    op = ReduceNormOp(
        dtype=DType.FLOAT64, dim=8, eps=1e-6, weight_offset=1.0, features=frozenset({"post_norm"} if post else ())
    )
    y, total = bound(op)(
        ReduceNormArgs(
            partial=partial.clone(),
            weight=weight,
            residual=residual.clone(),
            post_weight=post_weight if post else None,
        )
    )
    expected = residual + (norm(partial, post_weight, 1.0) if post else partial)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, norm(expected, weight, 1.0), rtol=1e-12, atol=1e-12)


class Summing(Recorded):
    """The second of two ranks; the first contributes a fixed tensor."""

    def __init__(self, other: Tensor) -> None:
        super().__init__(1, [[other], []])
        self._other = other

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x.add_(self._other)


@pytest.mark.parametrize("residual_rows", [6, 3])
@pytest.mark.parametrize("scatter", [False, True])
def test_reduce_norm_over_ranks(scatter: bool, residual_rows: int) -> None:
    if not scatter:
        residual_rows = 6
    partial, other, weight = torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)
    whole = torch.randn(6, 8)
    residual = whole if residual_rows == 6 else whole[3:]
    op = ReduceNormOp(dtype=DType.FLOAT32, dim=8, eps=1e-6, world=2, scatter=scatter)
    y, total = bound(op)(
        ReduceNormArgs(partial=partial.clone(), weight=weight, residual=residual.clone(), comm=Summing(other))
    )
    expected = (partial + other + whole)[3:] if scatter else partial + other + whole
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(y, norm(expected, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["int8_row", "fp8_row", "fp8_block128"])
def test_reduce_norm_hands_on_the_format_that_all_consumers_want(form: str) -> None:
    partial, residual, weight = torch.randn(5, 200), torch.randn(5, 200), torch.randn(200)
    fields: dict[str, Any] = {"dtype": DType.FLOAT32, "dim": 200, "eps": 1e-6}

    def run(**changes: Any) -> Any:
        args = ReduceNormArgs(partial=partial.clone(), weight=weight, residual=residual.clone())
        return bound(ReduceNormOp(**fields, **changes))(args)[0]

    y, plain = run(out_formats=(form,)), run()
    assert isinstance(y, Quantized) and y.format == form and y.q.shape == (5, 200)
    assert y.scale.shape == (5, 2 if form == "fp8_block128" else 1) and y.scale.dtype == torch.float32
    wide = y.scale.repeat_interleave(128, 1)[:, :200] if form == "fp8_block128" else y.scale
    step = 1 / 254 if form == "int8_row" else 1 / 16
    assert ((y.q.float() * wide - plain).abs() <= step * wide * 448 + 1e-6).all()
    assert isinstance(run(out_formats=("int8_row", "fp8_row")), Tensor)
