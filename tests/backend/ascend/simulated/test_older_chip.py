"""310P: fractal caches and the calls of its own library, whose real schemas are loaded too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checks import attention_step, close

from core.backend.ops import (
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    MoveTokensArgs,
    MoveTokensOp,
)
from core.spec import CacheKind, DType, KVCacheSpec
from core_conformance.subject import Subject
from core_conformance.target import load_target


@pytest.fixture
def old() -> Iterator[Subject]:
    """A simulated 310P; the shared 910B is simulated again afterwards."""
    from core_ascend.chips import CHIPS
    from core_ascend.simulation import chip_types

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORE_ASCEND_SIMULATE", "Ascend310P3")
        target = load_target("ascend")
        yield Subject(target)
        target.close()
    chip_types.set_chip(CHIPS[0])


HALF = {"dtype": DType.FLOAT16, "kv_dtype": DType.FLOAT16}


def test_attention_and_writes_over_fractals_agree_with_the_oracle(subject: Subject, old: Subject) -> None:
    attention_step(old, **HALF)
    attention_step(old, window=40, **HALF)
    attention_step(old, ([1, 1], [130, 64]), padding=2, **HALF)


def test_blocks_leave_and_return_in_the_canonical_form(subject: Subject, old: Subject) -> None:
    spec = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=2, head_dim=32, v_head_dim=32, dtype=DType.FLOAT16)
    layout = old.backend.kv_layout(spec, 64)
    cache = tuple(torch.randn(4, *plane.block_shape).half() for plane in layout.planes)
    ids = torch.tensor([3, 1], dtype=torch.int32)
    planes = old.backend.bind(ExportBlocksOp(dtype=DType.FLOAT16, layout=layout))(
        ExportBlocksArgs(cache=cache, block_ids=ids)
    )
    assert [tuple(plane.shape) for plane in planes] == [(128, 2, 32)] * 2
    # Element (token 5, head 1, dim 20) of block 3 lies in fractal 1 * 2 + 1, row 5, column 4.
    assert planes[0][5, 1, 20] == cache[0][3, 3, 5, 4]
    other = tuple(torch.zeros_like(plane) for plane in cache)
    old.backend.bind(ImportBlocksOp(dtype=DType.FLOAT16, layout=layout))(
        ImportBlocksArgs(cache=other, block_ids=ids, planes=planes)
    )
    assert all(torch.equal(a[[1, 3]], b[[1, 3]]) and not b[0].any() for a, b in zip(cache, other, strict=True))


def test_tokens_move_between_slots_of_fractals(subject: Subject, old: Subject) -> None:
    spec = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=1, head_dim=16, v_head_dim=16, dtype=DType.FLOAT16)
    layout = old.backend.kv_layout(spec, 64)
    cache = tuple(torch.randn(3, *plane.block_shape).half() for plane in layout.planes)
    before = cache[0].clone()
    old.backend.bind(MoveTokensOp(dtype=DType.FLOAT16, layout=layout))(
        MoveTokensArgs(
            cache=cache,
            source_slots=torch.tensor([70, -1, 71], dtype=torch.int32),
            target_slots=torch.tensor([71, 5, 130], dtype=torch.int32),
        )
    )
    close(cache[0][1, :, 7], before[1, :, 6], 1e-6, "slot 71")
    close(cache[0][2, :, 2], before[1, :, 7], 1e-6, "slot 130")
    assert torch.equal(cache[0][0], before[0])
