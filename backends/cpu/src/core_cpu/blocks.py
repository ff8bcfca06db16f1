"""The private cache layout, and the operations that carry blocks into and out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend import KVLayout, Plane, torch_dtype
from core.backend.ops import (
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    LayerCache,
    MoveTokensArgs,
    MoveTokensOp,
)
from core.spec import KVCacheSpec
from core_cpu import kernels

__all__ = ["CpuLayout", "ExportBlocks", "ImportBlocks", "MoveTokens", "Planes", "cpu_layout"]


@dataclass(frozen=True, kw_only=True)
class CpuLayout(KVLayout):
    """Keys and values in panels of 16, as attention reads them.

    Args:
        v_head_dim: Elements of a value head; its plane pads them to a multiple of 16.
    """

    v_head_dim: int


def cpu_layout(spec: KVCacheSpec, block_size: int) -> CpuLayout:
    """The layout of a cache of keys and values."""
    shapes = kernels.kv_block_shapes(
        torch_dtype(spec.dtype), spec.num_kv_heads, spec.head_dim, spec.v_head_dim, block_size
    )
    planes = tuple(
        Plane(name=name, dtype=spec.dtype, block_shape=shape, head_axis=0)
        for name, shape in zip(("key", "value"), shapes, strict=True)
    )
    layout_id = f"cpu/{block_size}/{spec.num_kv_heads}x{spec.head_dim}+{spec.v_head_dim}/{spec.dtype}"
    return CpuLayout(id=layout_id, planes=planes, block_size=block_size, v_head_dim=spec.v_head_dim)


class Planes:
    """The kernels' view of a layer's cache, made once: the planes of a layer do not move."""

    __slots__ = ("_cache", "_planes", "_v_head_dim")

    def __init__(self, v_head_dim: int) -> None:
        self._v_head_dim = v_head_dim
        self._cache: LayerCache | None = None
        self._planes: kernels.KvPlanes | None = None

    def of(self, cache: LayerCache) -> kernels.KvPlanes:
        """The view of `cache`; made anew only where it is another tuple than last time."""
        if self._cache is not cache or self._planes is None:
            self._cache, self._planes = cache, kernels.KvPlanes(cache[0], cache[1], self._v_head_dim)
        return self._planes


def _planes_of(layout: KVLayout) -> Planes:
    assert isinstance(layout, CpuLayout), f"{layout.id} is not a layout of this backend"
    return Planes(layout.v_head_dim)


def _slots(block_ids: Tensor, block_size: int) -> Tensor:
    """Every slot of some blocks, in order."""
    return (block_ids[:, None] * block_size + torch.arange(block_size, dtype=torch.int32)).flatten()


class ExportBlocks:
    """export_blocks."""

    def __init__(self, op: ExportBlocksOp) -> None:
        self._planes, self._block_size = _planes_of(op.layout), op.layout.block_size

    def __call__(self, args: ExportBlocksArgs) -> tuple[Tensor, ...]:
        return kernels.kv_read(self._planes.of(args.cache), _slots(args.block_ids, self._block_size))


class ImportBlocks:
    """import_blocks."""

    def __init__(self, op: ImportBlocksOp) -> None:
        self._planes, self._block_size = _planes_of(op.layout), op.layout.block_size

    def __call__(self, args: ImportBlocksArgs) -> None:
        key, value = args.planes
        kernels.kv_write(key, value, self._planes.of(args.cache), _slots(args.block_ids, self._block_size))


class MoveTokens:
    """move_tokens: reads every source, then writes every target; a pair with -1 on either side is skipped."""

    def __init__(self, op: MoveTokensOp) -> None:
        self._planes = _planes_of(op.layout)

    def __call__(self, args: MoveTokensArgs) -> None:
        planes = self._planes.of(args.cache)
        targets = torch.where(args.source_slots < 0, -1, args.target_slots)
        key, value = kernels.kv_read(planes, args.source_slots)
        kernels.kv_write(key, value, planes, targets)
