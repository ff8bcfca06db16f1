"""Paged and ragged attention and the cache writes: float64 references, poison, counting probes, odd shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from kernel_bounds import UNIT
from torch import Tensor

from core_cpu import kernels

POISON = math.nan


@dataclass
class Case:
    """Requests of (query_len, seq_len) and the shape of the layer."""

    requests: list[tuple[int, int]]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    v_dim: int = 64
    block: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    sinks: bool = False
    split_keys: int = 0
    int16: bool = False

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.dim)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int]) -> Tensor:
    return int32([0, *torch.tensor(lengths).cumsum(0).tolist()]) if lengths else int32([0])


def new_planes(case: Case, num_blocks: int) -> kernels.KvPlanes:
    """A poisoned cache."""
    dtype = case.kv_dtype or case.dtype
    shapes = kernels.kv_block_shapes(dtype, case.kv_heads, case.dim, case.v_dim, case.block)
    key, value = (torch.full((num_blocks, *shape), POISON, dtype=dtype) for shape in shapes)
    return kernels.KvPlanes(key, value, case.v_dim)


def fill_cache(case: Case, keys: list[Tensor], values: list[Tensor]) -> tuple[kernels.KvPlanes, Tensor]:
    """Writes each request's keys into shuffled blocks; blocks that fell out of the window stay null and unwritten."""
    counts = [-(-seq // case.block) for _, seq in case.requests]
    num_blocks = sum(counts) + 4
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    table = torch.zeros(len(counts), max([*counts, 1]) + 2, dtype=torch.int32)
    planes = new_planes(case, num_blocks)
    for r, (query, seq) in enumerate(case.requests):
        table[r, : counts[r]] = int32([order.pop() for _ in range(counts[r])])
        first = max(0, seq - query - case.window + 1) if case.window and case.causal else 0
        table[r, : first // case.block] = 0
        at = torch.arange(seq)
        slots = table[r, at // case.block] * case.block + at % case.block
        slots[: first // case.block * case.block] = -1
        kernels.kv_write(keys[r], values[r], planes, slots.to(torch.int32))
    return planes, table


def reference(
    case: Case, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """(output, log-sum-exp, bound of the output, absolute bound of the log-sum-exp) of one request, float64."""
    n, seq = len(query), len(key)
    q, k, v = (x.double() for x in (query, key, value))
    group = case.heads // case.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = torch.einsum("nhd,shd->hns", q, k) * case.scale
    sizes = torch.einsum("nhd,shd->hns", q.abs(), k.abs()) * case.scale
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    at, position = torch.arange(seq), torch.arange(seq - n, seq)[:, None]
    seen = torch.ones(n, seq, dtype=torch.bool)
    if case.causal:
        seen &= at <= position
        if case.window:
            seen &= at > position - case.window
    logits = logits.masked_fill(~seen, -torch.inf)
    joined = logits if sinks is None else torch.cat((logits, sinks.double().view(-1, 1, 1).expand(-1, n, 1)), -1)
    lse = torch.logsumexp(joined, -1)
    p = torch.exp(logits - lse[..., None])
    out = torch.einsum("hns,shd->nhd", p, v)
    size = torch.einsum("hns,shd->nhd", p, v.abs())
    reads_bf16 = kernels.isa().endswith("bf16") and case.dtype == torch.bfloat16
    logit_error = 4 * case.dim**0.5 * UNIT[torch.float32] * sizes.masked_fill(~seen, 0).amax(-1).T[..., None]
    error = 2 * logit_error + 4 * max(seq, 1) ** 0.5 * UNIT[torch.float32] + 4e-7
    error = error + (UNIT[torch.bfloat16] if reads_bf16 else 0)
    bound = UNIT[case.dtype] * out.abs() + error * size + 1e-7
    if not case.int16:
        return out, lse.T, bound, 3e-5
    moved = float(_rounded_logits(case, q, k, seen).amax())
    largest = (v.abs().amax(-1).T[:, None] * seen).amax(-1).T[..., None] if seq else 0.0  # of the values that are seen
    bound = bound + math.expm1(2 * moved) * size + (INT16_UNIT + 4 * math.sqrt(128) * INT16_UNIT / 4) * largest
    return out, lse.T, bound, moved + 3e-5


INT16_UNIT = 2.0**-12
"""Half a step of numbers whose largest is 2,047."""


def _rounded_logits(case: Case, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[h, n, s]: how far logits may move where queries and keys are rounded to steps of their largest magnitude."""
    query_step = torch.einsum("nh,shd->hns", q.abs().amax(-1), k.abs()) * INT16_UNIT
    key_step = torch.einsum("nhd,sh->hns", q.abs(), k.abs().amax(-1)) * INT16_UNIT
    return ((query_step + key_step) * case.scale).masked_fill(~seen, 0)


def random_case(case: Case) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor | None]:
    kv_dtype = case.kv_dtype or case.dtype
    tokens = sum(query for query, _ in case.requests)
    query = torch.randn(tokens, case.heads, case.dim).to(case.dtype)
    keys = [torch.randn(seq, case.kv_heads, case.dim).to(kv_dtype) for _, seq in case.requests]
    values = [torch.randn(seq, case.kv_heads, case.v_dim).to(kv_dtype) for _, seq in case.requests]
    return query, keys, values, torch.randn(case.heads) if case.sinks else None


def run_paged(
    case: Case, query: Tensor, planes: kernels.KvPlanes, table: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    lse = torch.full((len(query), case.heads), POISON)
    out = kernels.attention(
        query,
        planes,
        starts([q for q, _ in case.requests]),
        int32([s for _, s in case.requests]),
        table,
        scale=case.scale,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
        lse=lse,
        split_keys=case.split_keys,
        int16=case.int16,
    )
    return out, lse


def check(
    case: Case, out: Tensor, lse: Tensor, query: Tensor, keys: list[Tensor], values: list[Tensor], sinks: Tensor | None
) -> None:
    begin = 0
    for r, (n, _) in enumerate(case.requests):
        ref, ref_lse, bound, lse_bound = reference(case, query[begin : begin + n], keys[r], values[r], sinks)
        error = (out[begin : begin + n].double() - ref).abs() / bound
        assert torch.isfinite(out[begin : begin + n]).all(), f"request {r}"
        assert error.numel() == 0 or error.max() <= 1, f"request {r}: {error.max():.2f} of the bound"
        assert torch.allclose(lse[begin : begin + n].double(), ref_lse, atol=lse_bound, rtol=3e-6)
        begin += n


MIXED = [(1, 1), (1, 16), (1, 17), (1, 300), (3, 3), (5, 40), (16, 16), (33, 161)]
CASES = {
    "mixed": Case(MIXED),
    "mixed_bf16": Case(MIXED, dtype=torch.bfloat16),
    "mixed_fp16": Case(MIXED, dtype=torch.float16),
    "fp32_query_bf16_cache": Case(MIXED, kv_dtype=torch.bfloat16),
    "bf16_query_fp32_cache": Case(MIXED, dtype=torch.bfloat16, kv_dtype=torch.float32),
    "prefill": Case([(200, 200), (130, 130)]),
    "prefill_bf16": Case([(200, 200), (130, 130)], dtype=torch.bfloat16),
    "one_head_each": Case(MIXED, heads=4, kv_heads=4),
    "one_kv_head": Case([(1, 50), (7, 60)], heads=56, kv_heads=1),
    "nine_on_three_block_32": Case([(1, 200), (40, 90)], heads=9, kv_heads=3, block=32, dtype=torch.bfloat16),
    "block_128": Case(MIXED, block=128, dtype=torch.bfloat16),
    "dim_8": Case(MIXED, dim=8, v_dim=8),
    "dim_80_v_40": Case(MIXED, dim=80, v_dim=40, dtype=torch.bfloat16),
    "dim_24_v_56": Case(MIXED, dim=24, v_dim=56),
    "dim_512": Case([(1, 40), (9, 20)], heads=2, kv_heads=1, dim=512, v_dim=512, dtype=torch.bfloat16),
    "dim_192_v_128": Case([(2, 40), (9, 20)], dim=192, v_dim=128, dtype=torch.bfloat16),
    "window": Case(MIXED, window=33),
    "window_bf16": Case(MIXED, window=20, dtype=torch.bfloat16),
    "window_odd_start_bf16": Case([(1, s) for s in range(40, 60)], window=7, dtype=torch.bfloat16),
    "window_1": Case(MIXED, window=1, dtype=torch.bfloat16),
    "softcap": Case(MIXED, softcap=5.0),
    "sinks": Case(MIXED, sinks=True),
    "sinks_window_softcap_bf16": Case(MIXED, sinks=True, window=40, softcap=30.0, dtype=torch.bfloat16),
    "not_causal": Case(MIXED, causal=False),
    "long_decode": Case([(1, 1500)]),
    "long_decode_bf16": Case([(1, 1500), (1, 900)], heads=9, kv_heads=3, dtype=torch.bfloat16),
    "long_decode_sinks_split": Case([(1, 1500), (2, 700)], sinks=True, split_keys=256),
    "long_decode_window_split": Case([(1, 1500)], window=700, split_keys=128, dtype=torch.bfloat16),
    "never_split": Case([(1, 1500)], split_keys=-1),
}


@pytest.mark.parametrize("name", CASES)
def test_paged_attention_against_float64_with_poison_in_every_slot_not_owned(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]
    query, keys, values, sinks = random_case(case)
    planes, table = fill_cache(case, keys, values)
    out, lse = run_paged(case, query, planes, table, sinks)
    check(case, out, lse, query, keys, values, sinks)


in_int16 = pytest.mark.skipif(not kernels.rounds_attention(), reason="needs 16-bit integer dot products (AVX-512 VNNI)")


@in_int16
@pytest.mark.parametrize("split_keys", [0, -1, 128])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == torch.bfloat16])
def test_attention_in_int16_is_off_by_no_more_than_its_rounding(name: str, split_keys: int) -> None:
    torch.manual_seed(1)
    case = replace(CASES[name], int16=True, split_keys=split_keys)
    query, keys, values, sinks = random_case(case)
    planes, table = fill_cache(case, keys, values)
    out, lse = run_paged(case, query, planes, table, sinks)
    check(case, out, lse, query, keys, values, sinks)
    plain, _ = run_paged(replace(case, int16=False), query, planes, table, sinks)
    if case.kv_dtype is None:
        assert split_keys == 0 or not torch.equal(out, plain), "nothing was rounded"


@in_int16
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other() -> None:
    torch.manual_seed(2)
    case = Case([(64, 64)], dtype=torch.bfloat16, int16=True)
    query, keys, values, _ = random_case(case)
    values[0][40, 0, 3] = math.inf
    keys[0][50, 1, 7] = math.nan
    planes, table = fill_cache(case, keys, values)
    out, _ = run_paged(case, query, planes, table, None)
    finite = torch.isfinite(out).all(-1)
    assert finite[:40].all() and not finite[40:, :3].any(), "heads 0 to 2 read the value"
    assert finite[:50, 3:].all(), "heads 3 to 5 read the key"


@in_int16
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("of_all_keys", [False, True])
def test_a_query_or_keys_that_are_not_finite_do_not_give_numbers(bad: float, of_all_keys: bool) -> None:
    torch.manual_seed(2)
    case = Case([(200, 200)], dtype=torch.bfloat16, int16=True)
    query, keys, values, _ = random_case(case)
    if of_all_keys:
        keys[0][:, 0, 5] = bad
    else:
        query[150, 1, 7] = bad
    planes, table = fill_cache(case, keys, values)
    out, _ = run_paged(case, query, planes, table, None)
    hit = torch.zeros(200, 6, dtype=torch.bool)
    hit[:, :3] = of_all_keys
    hit[150, 1] = True
    assert torch.equal(torch.isfinite(out).all(-1), ~hit)


@in_int16
def test_zeros_and_numbers_of_very_different_sizes_are_rounded_by_row() -> None:
    torch.manual_seed(4)
    case = Case([(70, 70)], dtype=torch.bfloat16, int16=True)
    query, keys, values, _ = random_case(case)
    query[5] = 0
    keys[0] *= 10 ** (4 * torch.rand(70, 1, 1) - 3)
    values[0] *= 10 ** (8 * torch.rand(70, 1, 1) - 4)
    keys[0][9], values[0][11] = 0, 0
    planes, table = fill_cache(case, keys, values)
    out, lse = run_paged(case, query, planes, table, None)
    check(case, out, lse, query, keys, values, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 37])
def test_counting_probe_shows_exactly_which_keys_each_query_reads(dtype: torch.dtype, window: int) -> None:
    """With q = 0 every key that is read weighs the same, and a one-hot V says which ones they were."""
    requests = [(1, 1), (1, 23), (4, 50), (30, 64), (1, 64)]
    case = Case(requests, heads=2, kv_heads=1, v_dim=64, dtype=dtype, window=window)
    query = torch.zeros(sum(q for q, _ in requests), 2, case.dim, dtype=dtype)
    keys = [torch.randn(s, 1, case.dim).to(dtype) for _, s in requests]
    values = [torch.eye(64)[:s, None].to(dtype) for _, s in requests]
    planes, table = fill_cache(case, keys, values)
    out, _ = run_paged(case, query, planes, table, None)
    begin = 0
    for n, seq in requests:
        for i in range(n):
            position = seq - n + i
            first = max(0, position - window + 1) if window else 0
            expected = torch.zeros(64)
            expected[first : position + 1] = 1 / (position + 1 - first)
            for head in range(2):
                assert torch.allclose(out[begin + i, head].float(), expected, rtol=2**-7, atol=0)
        begin += n


def test_gqa_heads_read_their_own_kv_head() -> None:
    case = Case([(3, 20)], heads=12, kv_heads=4, v_dim=16)
    query = torch.zeros(3, 12, case.dim)
    keys = [torch.randn(20, 4, case.dim)]
    values = [torch.eye(4, 16).expand(20, 4, 16).contiguous()]
    planes, table = fill_cache(case, keys, values)
    out, _ = run_paged(case, query, planes, table, None)
    for head in range(12):
        assert torch.allclose(out[:, head], torch.eye(4, 16)[head // 3].expand(3, 16), atol=1e-6)


def test_padding_rows_of_the_null_block_are_zero_and_harm_nothing() -> None:
    case = Case([(1, 30), (1, 1), (2, 2)])
    query, keys, values, _ = random_case(case)
    planes, table = fill_cache(case, keys, values)
    alone, _ = run_paged(case, query, planes, table, None)
    table[1:] = 0
    out, lse = run_paged(case, query, planes, table, None)
    assert torch.equal(out[:1], alone[:1])
    assert (out[1:] == 0).all()
    assert (lse[1:] == -torch.inf).all()


def test_a_request_without_queries_and_a_step_without_requests_write_nothing() -> None:
    case = Case([(0, 40), (2, 5), (0, 3)])
    query, keys, values, _ = random_case(case)
    planes, table = fill_cache(case, keys, values)
    out, lse = run_paged(case, query, planes, table, None)
    check(case, out, lse, query, keys, values, None)
    empty = Case([])
    out, _ = run_paged(empty, torch.empty(0, 6, 64), planes, torch.zeros(0, 1, dtype=torch.int32), None)
    assert out.shape == (0, 6, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 50, 150])
@pytest.mark.parametrize("split_keys", [-1, 128])
def test_a_row_has_the_same_bits_in_any_chunking_unless_splits_are_free(
    dtype: torch.dtype, window: int, split_keys: int
) -> None:
    torch.manual_seed(3)
    case = Case([(300, 300)], dtype=dtype, split_keys=split_keys)
    query, keys, values, _ = random_case(case)
    planes, table = fill_cache(case, keys, values)
    case.window = window
    whole, _ = run_paged(case, query, planes, table, None)
    for size in (1, 7, 64):
        pieces = []
        for begin in range(0, 300, size):
            end = min(300, begin + size)
            case.requests = [(end - begin, end)]
            pieces.append(run_paged(case, query[begin:end], planes, table, None)[0])
        assert torch.equal(torch.cat(pieces), whole)


def test_strides_of_a_fused_qkv_output_are_taken_as_they_are() -> None:
    case = Case([(20, 20)], heads=4, kv_heads=2, dtype=torch.bfloat16)
    fused = torch.randn(20, 8 * 64).bfloat16()
    q, k, v = (part.unflatten(1, (-1, 64)) for part in fused.split((256, 128, 128), dim=1))
    planes, table = fill_cache(case, [k], [v])
    out, lse = run_paged(case, q, planes, table, None)
    check(case, out, lse, q, [k], [v], None)


RAGGED = {
    "self": Case([(5, 5), (40, 40), (1, 1), (130, 130)]),
    "self_bf16": Case([(5, 5), (40, 40), (130, 130)], dtype=torch.bfloat16),
    "cross": Case([(5, 90), (40, 3), (0, 7)], causal=False, dtype=torch.bfloat16),
    "appended": Case([(5, 90), (4, 30)], dim=40, v_dim=24, window=17, sinks=True),
}


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_attention_takes_keys_that_are_in_no_cache(name: str) -> None:
    torch.manual_seed(2)
    case = RAGGED[name]
    query, keys, values, sinks = random_case(case)
    lse = torch.full((len(query), case.heads), POISON)
    out = kernels.attention_ragged(
        query,
        torch.cat(keys),
        torch.cat(values),
        starts([q for q, _ in case.requests]),
        starts([s for _, s in case.requests]),
        scale=case.scale,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=sinks,
        lse=lse,
    )
    check(case, out, lse, query, keys, values, sinks)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [16, 48])
def test_kv_write_rounds_and_touches_the_named_slots_alone(kv_dtype: torch.dtype, block: int) -> None:
    case = Case([], kv_heads=3, dim=24, v_dim=40, block=block, kv_dtype=kv_dtype)
    planes = new_planes(case, 5)
    slots = int32([block + 3, -1, 4 * block - 1, 0, 2 * block + 7])
    key, value = torch.randn(9, 3, 24), torch.randn(9, 3, 40)
    kernels.kv_write(key, value, planes, slots)
    every = torch.arange(5 * block, dtype=torch.int32)
    got_key, got_value = kernels.kv_read(planes, every)
    written = torch.zeros(5 * block, dtype=torch.bool)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            written[slot] = True
            assert torch.equal(got_key[slot], key[t].to(kv_dtype))
            assert torch.equal(got_value[slot], value[t].to(kv_dtype))
    assert torch.isnan(got_key[~written]).all()
    assert torch.isnan(got_value[~written]).all()
    zeros, _ = kernels.kv_read(planes, int32([-1]))
    assert (zeros == 0).all()


def test_copy_blocks_moves_bytes_between_planes_of_one_layout() -> None:
    source, target = torch.randn(6, 2, 16, 8), torch.zeros(4, 2, 16, 8)
    kernels.copy_blocks(source, target, [(5, 1), (2, 3)])
    assert torch.equal(target[1], source[5])
    assert torch.equal(target[3], source[2])
    assert (target[[0, 2]] == 0).all()
    kernels.copy_blocks(source, target, [])
    with pytest.raises(ValueError, match=r"\(6, 0\) is outside 6 and 4"):
        kernels.copy_blocks(source, target, [(6, 0)])


def test_wrong_arguments_are_refused_with_the_value() -> None:
    case = Case([(2, 5)])
    query, keys, values, _ = random_case(case)
    planes, table = fill_cache(case, keys, values)
    with pytest.raises(ValueError, match="query must be"):
        run_paged(case, query[:, :, :32], planes, table, None)
    with pytest.raises(ValueError, match="block_table must be int32"):
        run_paged(case, query, planes, table.long(), None)
    with pytest.raises(ValueError, match="multiple of 16, got 8"):
        kernels.kv_block_shapes(torch.float32, 1, 64, 64, 8)
    with pytest.raises(ValueError, match="fewer tokens than slots"):
        kernels.kv_write(keys[0], values[0], planes, int32([0] * 6))
