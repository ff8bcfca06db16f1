"""`attention` of the reference against loops in numpy, torch's own kernel, and two models' eager attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from bare import bound
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import PagedStep, kv_spec, make_plan
from torch import Tensor

from core.backend.ops import AttentionArgs, AttentionOp, Determinism
from core.spec import DType

Array = np.ndarray[Any, Any]


def attention_op(**changes: Any) -> AttentionOp:
    fields: dict[str, Any] = {
        "dtype": DType.FLOAT64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "v_head_dim": 6,
        "kv_dtype": DType.FLOAT64,
        "scale": 0.3,
    }
    return AttentionOp(**(fields | changes))


def one_query(op: AttentionOp, q: Array, keys: Array, values: Array, sink: float | None) -> tuple[Array, float]:
    """One head of one query over the keys that it sees, from the definition."""
    logits = [op.scale * float(q @ k) for k in keys]
    if op.softcap:
        logits = [op.softcap * math.tanh(x / op.softcap) for x in logits]
    total = sum(math.exp(x) for x in logits) + (math.exp(sink) if sink is not None else 0.0)
    mixed = sum((math.exp(x) * v for x, v in zip(logits, values, strict=True)), np.zeros(op.v_head_dim)) / total
    return mixed, math.log(total)


def brute(
    op: AttentionOp, query: Tensor, keys: Tensor, values: Tensor, first: int, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of one request whose first query stands at position `first`."""
    q, k, v = (x.double().numpy() for x in (query, keys, values))
    out, lse = np.zeros((len(q), op.num_heads, op.v_head_dim)), np.zeros((len(q), op.num_heads))
    for i in range(len(q)):
        p = first + i
        seen = range(max(0, p - op.window + 1) if op.window else 0, p + 1) if op.causal else range(len(k))
        for h in range(op.num_heads):
            group = h // (op.num_heads // op.num_kv_heads)
            sink = None if sinks is None else float(sinks[h])
            out[i, h], lse[i, h] = one_query(op, q[i, h], k[seen, group], v[seen, group], sink)
    return torch.from_numpy(out), torch.from_numpy(lse)


def filled(op: AttentionOp, query_lens: list[int], seq_lens: list[int], **options: Any) -> tuple[PagedStep, Any, Any]:
    """A step whose cache holds random keys and values where requests own slots, and NaN elsewhere."""
    spec = kv_spec(op.num_kv_heads, op.head_dim, op.v_head_dim, op.kv_dtype)
    step = PagedStep(query_lens, seq_lens, spec, window=op.window if op.causal else 0, **options)
    keys = [torch.randn(n, op.num_kv_heads, op.head_dim, dtype=torch.float64) for n in seq_lens]
    values = [torch.randn(n, op.num_kv_heads, op.v_head_dim, dtype=torch.float64) for n in seq_lens]
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        step.store(0, row, key)
        step.store(1, row, value)
    return step, keys, values


def check(op: AttentionOp, query_lens: list[int], seq_lens: list[int], **options: Any) -> None:
    step, keys, values = filled(op, query_lens, seq_lens, **options)
    query = torch.randn(step.num_tokens, op.num_heads, op.head_dim, dtype=torch.float64)
    sinks = torch.randn(op.num_heads) if op.has("sinks") else None
    lse = torch.zeros(step.num_tokens, op.num_heads, dtype=torch.float64) if op.has("lse") else None
    args = AttentionArgs(query=query, cache=step.cache, plan=step.plan, sinks=sinks, lse=lse)
    out = bound(op)(args)
    assert out.shape == (step.num_tokens, op.num_heads, op.v_head_dim) and out.isfinite().all()
    for row, (start, end) in enumerate(step.spans()):
        first = seq_lens[row] - query_lens[row]
        expected, expected_lse = brute(op, query[start:end], keys[row], values[row], first, sinks)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-11, atol=1e-12)
        if lse is not None:
            torch.testing.assert_close(lse[start:end], expected_lse, rtol=1e-11, atol=1e-12)


MIXED = ([1, 1, 3, 6], [9, 4, 8, 6])
"""Two decodes, a chunk after five keys, a whole prompt; block size 4."""


@pytest.mark.parametrize("determinism", list(Determinism))
@pytest.mark.parametrize("window", [0, 1, 3, 5])
def test_mixed_batch(window: int, determinism: Determinism) -> None:
    check(attention_op(window=window, determinism=determinism), *MIXED)


@pytest.mark.parametrize("features", [{"sinks"}, {"lse"}, {"sinks", "lse"}])
@pytest.mark.parametrize("softcap", [0.0, 1.7])
def test_softcap_sinks_and_lse(softcap: float, features: set[str]) -> None:
    check(attention_op(softcap=softcap, features=frozenset(features), window=4), *MIXED)


def test_bidirectional_sees_all_keys_of_the_request() -> None:
    check(attention_op(causal=False), *MIXED)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 1), (6, 3)])
def test_head_maps(heads: int, kv_heads: int) -> None:
    check(attention_op(num_heads=heads, num_kv_heads=kv_heads), [1, 5], [7, 5])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 11)), min_size=1, max_size=4),
    st.integers(0, 7),
    st.sampled_from([1, 2, 4, 16]),
    st.integers(0, 2),
    st.booleans(),
)
def test_any_batch(requests: list[tuple[int, int]], window: int, block_size: int, padding: int, exact: bool) -> None:
    query_lens = [query for query, _ in requests]
    seq_lens = [query + past for query, past in requests]
    options = {"block_size": block_size, "padding": padding, "exact": exact, "seed": window}
    check(attention_op(window=window), query_lens, seq_lens, **options)


def test_padding_rows_are_finite_with_nan_queries_and_a_poisoned_null_block() -> None:
    op = attention_op(features=frozenset({"lse"}))
    step, _, _ = filled(op, [1], [5], padding=3)
    query = torch.full((4, 4, 8), float("nan"), dtype=torch.float64)
    query[0] = 1.0
    lse = torch.zeros(4, 4)
    assert step.cache[0][0].isnan().all(), "the null block is poisoned"
    out = bound(op)(AttentionArgs(query=query, cache=step.cache, plan=step.plan, lse=lse))
    assert out.isfinite().all() and lse[0].isfinite().all()


def test_tokens_after_the_last_request_are_finite() -> None:
    op = attention_op(features=frozenset({"ragged"}))
    plan = make_plan([2], [2], padding_tokens=3)
    nan = torch.full((5, 4, 8), float("nan"), dtype=torch.float64)
    query, key, value = nan.clone(), nan[:, :2].clone(), nan[:, :2, :6].clone()
    query[:2], key[:2], value[:2] = 1.0, 1.0, 2.0
    out = bound(op)(AttentionArgs(query=query, cache=None, plan=plan, key=key, value=value))
    assert out.isfinite().all() and (out[:2] == 2.0).all()


@pytest.mark.parametrize("asked", [Determinism.D0, Determinism.D3])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, 2), (False, 0)])
def test_ragged_equals_torch_attention(causal: bool, window: int, asked: Determinism) -> None:
    ragged = frozenset({"ragged"})
    op = attention_op(features=ragged, causal=causal, window=window, v_head_dim=8, determinism=asked)
    lens = [3, 1, 5]
    plan = make_plan(lens, lens)
    query, key, value = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    out = bound(op)(AttentionArgs(query=query, cache=None, plan=plan, key=key, value=value))
    start = 0
    for n in lens:
        part = slice(start, start + n)
        q, k, v = (x[part].transpose(0, 1) for x in (query, key, value))
        mask = torch.ones(n, n, dtype=torch.bool)
        if causal:
            mask = mask.tril() & (torch.ones(n, n, dtype=torch.bool).triu(1 - window) if window else True)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(out[part], expected[0].transpose(0, 1), rtol=1e-11, atol=1e-12)
        start += n


def test_the_cache_and_not_the_fresh_keys_defines_the_result() -> None:
    op = attention_op()
    step, _, _ = filled(op, [3], [7])
    query = torch.randn(3, 4, 8, dtype=torch.float64)
    nan = torch.full((3, 2, 8), float("nan"), dtype=torch.float64)
    plain = bound(op)(AttentionArgs(query=query, cache=step.cache, plan=step.plan))
    hinted = bound(op)(AttentionArgs(query=query, cache=step.cache, plan=step.plan, key=nan, value=nan[..., :6]))
    assert torch.equal(plain, hinted)


@pytest.mark.parametrize("kv_dtype", [DType.FLOAT8_E4M3FN, DType.INT8])
def test_scales_multiply_what_was_stored(kv_dtype: DType) -> None:
    op = attention_op(kv_dtype=kv_dtype, features=frozenset({"scales"}))
    spec = kv_spec(2, 8, 6, kv_dtype)
    step = PagedStep([2], [6], spec)
    keys, values = torch.randint(-8, 8, (6, 2, 8)).double(), torch.randint(-8, 8, (6, 2, 6)).double()
    step.store(0, 0, keys)
    step.store(1, 0, values)
    k_scale, v_scale = torch.tensor([0.25, 0.5]), torch.tensor([0.125])
    query = torch.randn(2, 4, 8, dtype=torch.float64)
    args = AttentionArgs(query=query, cache=step.cache, plan=step.plan, k_scale=k_scale, v_scale=v_scale)
    expected, _ = brute(op, query, keys * k_scale.view(-1, 1), values * v_scale, 4, None)
    torch.testing.assert_close(bound(op)(args), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "unit"), [(DType.BFLOAT16, 2.0**-8), (DType.FLOAT16, 2.0**-11)])
def test_low_precision_is_rounded_once(dtype: DType, unit: float) -> None:
    low, high = attention_op(dtype=dtype, kv_dtype=dtype), attention_op(dtype=DType.FLOAT64, kv_dtype=dtype)
    step, _, _ = filled(low, *MIXED)
    query = torch.randn(step.num_tokens, 4, 8).bfloat16().half()
    out = bound(low)(AttentionArgs(query=query.to(getattr(torch, dtype)), cache=step.cache, plan=step.plan)).double()
    exact = bound(high)(AttentionArgs(query=query.double(), cache=step.cache, plan=step.plan))
    assert out.isfinite().all()
    assert ((out - exact).abs() <= 1.01 * unit * exact.abs() + 1e-6).all()


def test_chunks_do_not_show_in_class_d3() -> None:
    op = attention_op(dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32, determinism=Determinism.D3, window=6)
    step, keys, values = filled(op, [11], [11], seed=1)
    query = torch.randn(11, 4, 8)
    whole = bound(op)(AttentionArgs(query=query, cache=step.cache, plan=step.plan))
    for start, end in ((0, 1), (1, 6), (6, 11)):
        spec = kv_spec(2, 8, 6, DType.FLOAT32)
        chunk = PagedStep([end - start], [end], spec, seed=1)
        chunk.store(0, 0, keys[0][:end])
        chunk.store(1, 0, values[0][:end])
        part = bound(op)(AttentionArgs(query=query[start:end], cache=chunk.cache, plan=chunk.plan))
        assert torch.equal(part, whole[start:end])


def test_other_requests_do_not_show_in_class_d2() -> None:
    op = attention_op(dtype=DType.FLOAT32, kv_dtype=DType.FLOAT32, determinism=Determinism.D2)
    step, keys, values = filled(op, [1, 4], [7, 9])
    query = torch.randn(5, 4, 8)
    both = bound(op)(AttentionArgs(query=query, cache=step.cache, plan=step.plan))
    alone = PagedStep([4], [9], kv_spec(2, 8, 6, DType.FLOAT32), seed=5)
    alone.store(0, 0, keys[1])
    alone.store(1, 0, values[1])
    assert torch.equal(bound(op)(AttentionArgs(query=query[1:], cache=alone.cache, plan=alone.plan)), both[1:])


def test_sinks_equal_gpt_oss() -> None:
    from transformers.models.gpt_oss import modeling_gpt_oss

    eager: Any = modeling_gpt_oss.eager_attention_forward

    op = attention_op(features=frozenset({"ragged", "sinks"}), v_head_dim=8)
    query, key, value = (torch.randn(6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    args = AttentionArgs(query=query, cache=None, plan=make_plan([6], [6]), key=key, value=value, sinks=sinks)
    module: Any = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, sinks.double()
    mask = torch.full((6, 6), float("-inf"), dtype=torch.float64).triu(1)
    expected, _ = eager(module.eval(), *(x.transpose(0, 1)[None] for x in (query, key, value)), mask, scaling=0.3)
    torch.testing.assert_close(bound(op)(args), expected[0], rtol=1e-9, atol=1e-9)


def test_softcap_equals_gemma2() -> None:
    from transformers.models.gemma2 import modeling_gemma2

    eager: Any = modeling_gemma2.eager_attention_forward

    op = attention_op(dtype=DType.FLOAT32, features=frozenset({"ragged"}), v_head_dim=8, softcap=2.5)
    query, key, value = (torch.randn(6, heads, 8) for heads in (4, 2, 2))
    args = AttentionArgs(query=query, cache=None, plan=make_plan([6], [6]), key=key, value=value)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 2
    mask = torch.full((6, 6), float("-inf")).triu(1)
    inputs = (x.transpose(0, 1)[None] for x in (query, key, value))
    expected, _ = eager(module.eval(), *inputs, mask, scaling=0.3, softcap=2.5)
    torch.testing.assert_close(bound(op)(args), expected[0], rtol=1e-5, atol=1e-6)
