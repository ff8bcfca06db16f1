"""`lora_add_`, `move_tokens`, `export_blocks` and `import_blocks` of the reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bare import bound
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import i32, kv_spec
from torch import Tensor

from core.backend import KVLayout, KVSlab, UnsupportedError, canonical_layout
from core.backend.ops import (
    Determinism,
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    LoraAddArgs,
    LoraAddOp,
    MoveTokensArgs,
    MoveTokensOp,
    OpSpec,
)
from core.spec import DType

BLOCKS, BLOCK = 6, 4


def random_cache(kv_dtype: DType) -> tuple[KVLayout, tuple[Tensor, ...]]:
    layout = canonical_layout(kv_spec(2, 3, 5, kv_dtype), BLOCK)
    memory = torch.randint(0, 255, (BLOCKS * layout.block_bytes,), dtype=torch.uint8)
    return layout, KVSlab(tensor=memory, layout=layout, num_blocks=BLOCKS).views()


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("determinism", [Determinism.D0, Determinism.D2])
@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.BFLOAT16])
def test_lora_adds_each_tokens_own_adapter(dtype: DType, determinism: Determinism) -> None:
    kind = getattr(torch, dtype)
    y, x = torch.randn(6, 7).to(kind), torch.randn(6, 9).to(kind)
    a, b = torch.randn(3, 2, 9).to(kind), torch.randn(3, 7, 2).to(kind)
    ids = i32([2, -1, 0, 2, -1, 1])
    x[1] = float("nan")
    before = y.clone()
    op = LoraAddOp(dtype=dtype, determinism=determinism, in_features=9, out_features=7, rank=2, num_adapters=3)
    assert bound(op)(LoraAddArgs(y=y, x=x, a=a, b=b, adapter_ids=ids)) is None
    for t, adapter in enumerate(ids.tolist()):
        expected = before[t].double()
        if adapter >= 0:
            expected = expected + b[adapter].double() @ (a[adapter].double() @ x[t].double())
        torch.testing.assert_close(y[t].double(), expected.to(kind).double(), rtol=2.0**-7, atol=1e-12)
    assert torch.equal(y[[1, 4]], before[[1, 4]])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_tokens_move_as_if_all_were_read_first(data: st.DataObject) -> None:
    total = BLOCKS * BLOCK
    targets = data.draw(st.lists(st.integers(0, total - 1), unique=True, min_size=1, max_size=8))
    count = len(targets)
    sources = data.draw(st.lists(st.integers(-1, total - 1), min_size=count, max_size=count))
    layout, cache = random_cache(data.draw(st.sampled_from([DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.INT8])))
    before = [as_bytes(plane.flatten(0, 1)).clone() for plane in cache]
    args = MoveTokensArgs(cache=cache, source_slots=i32(sources), target_slots=i32(targets))
    assert bound(MoveTokensOp(dtype=DType.FLOAT32, layout=layout))(args) is None
    for plane, old in zip(cache, before, strict=True):
        expected = old.clone()
        for source, target in zip(sources, targets, strict=True):
            if source >= 0:
                expected[target] = old[source]
        assert torch.equal(as_bytes(plane.flatten(0, 1)), expected)


@pytest.mark.parametrize("kv_dtype", [DType.FLOAT32, DType.BFLOAT16, DType.FLOAT8_E4M3FN, DType.INT8])
def test_blocks_go_out_and_in_bit_by_bit(kv_dtype: DType) -> None:
    layout, cache = random_cache(kv_dtype)
    ids = i32([4, 1, 5])
    out = bound(ExportBlocksOp(dtype=DType.FLOAT32, layout=layout))(ExportBlocksArgs(cache=cache, block_ids=ids))
    for plane, tokens in zip(cache, out, strict=True):
        assert tokens.shape == (3 * BLOCK, *plane.shape[2:]) and tokens.dtype == plane.dtype
        assert torch.equal(as_bytes(tokens), as_bytes(torch.cat([plane[i] for i in ids.tolist()])))
    _, other = random_cache(kv_dtype)
    before = [as_bytes(plane).clone() for plane in other]
    targets = i32([2, 3, 0])
    args = ImportBlocksArgs(cache=other, block_ids=targets, planes=out)
    assert bound(ImportBlocksOp(dtype=DType.FLOAT32, layout=layout))(args) is None
    for plane, source, old in zip(other, cache, before, strict=True):
        for target, origin in zip(targets.tolist(), ids.tolist(), strict=True):
            assert torch.equal(as_bytes(plane[target]), as_bytes(source[origin]))
        untouched = [1, 4, 5]
        assert torch.equal(as_bytes(plane)[untouched], old[untouched])


@pytest.mark.parametrize("kind", [MoveTokensOp, ExportBlocksOp, ImportBlocksOp])
def test_a_private_layout_is_refused(kind: type[OpSpec]) -> None:
    layout, _ = random_cache(DType.FLOAT32)
    private = dataclasses.replace(layout, id="vendor/tiled")
    with pytest.raises(UnsupportedError, match="vendor/tiled"):
        bound(kind(dtype=DType.FLOAT32, layout=private))  # type: ignore[call-arg]
