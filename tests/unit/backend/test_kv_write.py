"""`kv_write` of the reference: which slots are written, with what, and which never."""

from __future__ import annotations

import pytest
import torch
from bare import bound
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import dtype_of, i32, kv_spec, make_plan
from torch import Tensor

from core.backend import KVSlab, Plan, canonical_layout
from core.backend.ops import KvWriteArgs, KvWriteOp
from core.spec import DType

HEADS, DIM, V_DIM, BLOCK, BLOCKS = 2, 6, 4, 4, 5


def write_op(kv_dtype: DType, v_head_dim: int = V_DIM, *features: str) -> KvWriteOp:
    return KvWriteOp(
        dtype=DType.FLOAT32,
        features=frozenset(features),
        num_kv_heads=HEADS,
        head_dim=DIM,
        v_head_dim=v_head_dim,
        kv_dtype=kv_dtype,
    )


def empty_cache(kv_dtype: DType, v_head_dim: int = V_DIM) -> tuple[Tensor, ...]:
    layout = canonical_layout(kv_spec(HEADS, DIM, v_head_dim, kv_dtype), BLOCK)
    memory = torch.full((BLOCKS * layout.block_bytes,), 0x5A, dtype=torch.uint8)
    return KVSlab(tensor=memory, layout=layout, num_blocks=BLOCKS).views()


def plan_of(slots: list[int]) -> Plan:
    return make_plan([len(slots)], [len(slots)], slots=slots)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, BLOCKS * BLOCK - 1), unique=True, max_size=9), st.integers(0, 3), st.randoms())
def test_named_slots_change_and_no_other(slots: list[int], skipped: int, order: object) -> None:
    slots = [*slots, *[-1] * skipped] or [-1]
    order.shuffle(slots)  # type: ignore[attr-defined]
    cache = empty_cache(DType.FLOAT32)
    before = [plane.clone() for plane in cache]
    key, value = torch.randn(len(slots), HEADS, DIM), torch.randn(len(slots), HEADS, V_DIM)
    bound(write_op(DType.FLOAT32))(KvWriteArgs(key=key, value=value, cache=cache, plan=plan_of(slots)))
    for plane, old, new in zip(cache, before, (key, value), strict=True):
        for slot, row in enumerate(plane.flatten(0, 1)):
            expected = new[slots.index(slot)] if slot in slots else old.flatten(0, 1)[slot]
            assert torch.equal(row, expected), slot


def test_tokens_past_the_slots_and_nan_of_padding_go_nowhere() -> None:
    cache = empty_cache(DType.FLOAT32)
    key, value = torch.full((3, HEADS, DIM), float("nan")), torch.full((3, HEADS, V_DIM), float("nan"))
    key[1], value[1] = 1.0, 2.0
    bound(write_op(DType.FLOAT32))(KvWriteArgs(key=key, value=value, cache=cache, plan=plan_of([-1, 6])))
    assert (cache[0].flatten(0, 1)[6] == 1.0).all() and (cache[1].flatten(0, 1)[6] == 2.0).all()
    assert all(plane.isfinite().all() for plane in cache)


def test_one_plane_where_there_is_no_value() -> None:
    cache = empty_cache(DType.FLOAT32, v_head_dim=0)
    key = torch.randn(2, HEADS, DIM)
    bound(write_op(DType.FLOAT32, 0))(KvWriteArgs(key=key, value=None, cache=cache, plan=plan_of([9, 4])))
    assert len(cache) == 1
    assert torch.equal(cache[0].flatten(0, 1)[[9, 4]], key)


def test_strided_inputs_are_read_by_their_strides() -> None:
    cache = empty_cache(DType.FLOAT32)
    fused = torch.randn(3, HEADS * (DIM + V_DIM) + 5)
    key = fused[:, : HEADS * DIM].unflatten(1, (HEADS, DIM))
    value = fused[:, HEADS * DIM : HEADS * (DIM + V_DIM)].unflatten(1, (HEADS, V_DIM))
    bound(write_op(DType.FLOAT32))(KvWriteArgs(key=key, value=value, cache=cache, plan=plan_of([5, 6, 7])))
    assert torch.equal(cache[0].flatten(0, 1)[5:8], key) and torch.equal(cache[1].flatten(0, 1)[5:8], value)


@pytest.mark.parametrize(
    "kv_dtype", [DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8, DType.BFLOAT16, DType.FLOAT16]
)
def test_scales_divide_before_one_rounding(kv_dtype: DType) -> None:
    cache = empty_cache(kv_dtype)
    key, value = torch.randn(2, HEADS, DIM) * 3, torch.randn(2, HEADS, V_DIM) * 3
    k_scale, v_scale = torch.tensor([0.37]), torch.tensor([0.11, 2.3])
    args = KvWriteArgs(key=key, value=value, cache=cache, plan=plan_of([5, 6]), k_scale=k_scale, v_scale=v_scale)
    bound(write_op(kv_dtype, V_DIM, "scales"))(args)
    for plane, new, scale in zip(cache, (key, value), (k_scale, v_scale), strict=True):
        stored = (new / scale.view(-1, 1)).clamp(-(2.0**15), 2.0**15)
        if kv_dtype is DType.INT8:
            stored = stored.round().clamp(-128, 127)
        expected = stored.to(dtype_of(kv_dtype))
        got = plane.view(torch.uint8).flatten(0, 1)[5:7]
        assert torch.equal(got, expected.view(torch.uint8))


def test_eight_bit_floats_saturate() -> None:
    cache = empty_cache(DType.FLOAT8_E4M3FN)
    key, value = torch.full((1, HEADS, DIM), 1e6), torch.full((1, HEADS, V_DIM), -1e6)
    bound(write_op(DType.FLOAT8_E4M3FN))(KvWriteArgs(key=key, value=value, cache=cache, plan=plan_of([8])))
    assert (cache[0].float().flatten(0, 1)[8] == 448).all() and (cache[1].float().flatten(0, 1)[8] == -448).all()


def test_indices_are_int32() -> None:
    assert i32([1]).dtype == torch.int32 == plan_of([1]).slots.dtype
