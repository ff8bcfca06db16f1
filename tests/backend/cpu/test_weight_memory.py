"""Memory of packed weights: aligned parts of large pieces, each given back once nothing of it is left."""

from __future__ import annotations

import gc
import weakref

import torch

from core_cpu.kernels.weight_memory import WeightMemory


def test_parts_are_aligned_and_do_not_overlap() -> None:
    memory = WeightMemory(chunk_bytes=4096)
    parts = [memory.take(size) for size in (1, 100, 64, 4000, 9000, 3)]
    for index, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0 and part.dtype is torch.uint8
        part.fill_(index)
    assert [part.numel() for part in parts] == [1, 100, 64, 4000, 9000, 3]
    for index, part in enumerate(parts):
        assert bool((part == index).all())


def test_small_weights_share_a_piece_and_a_large_one_has_its_own() -> None:
    memory = WeightMemory(chunk_bytes=4096)
    first, second, large = memory.take(64), memory.take(64), memory.take(10_000)
    assert second.data_ptr() - first.data_ptr() == 64
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_a_piece_is_freed_with_its_last_part() -> None:
    memory = WeightMemory(chunk_bytes=4096)
    first = memory.take(4000)
    freed = weakref.ref(first.untyped_storage())
    second = memory.take(4000)
    alive = second.untyped_storage().data_ptr()
    assert alive != first.untyped_storage().data_ptr()
    del first
    gc.collect()
    assert freed() is None
