"""Writing tokens into the cache, moving them, and blocks to and from the canonical form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import KVLayout
from core.backend.ops import (
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    KvWriteArgs,
    KvWriteOp,
    LayerCache,
    MoveTokensArgs,
    MoveTokensOp,
)
from core_ascend.chips import Chip
from core_ascend.layouts import FRACTAL, LATENT_DIM, fractal_cache, is_fractal, latent_cache
from core_ascend.plan import AscendPlan
from core_ascend.vendor import npu

__all__ = ["export_blocks", "import_blocks", "kv_write", "move_tokens", "plain_store", "write"]

Store = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(key, value, key plane, value plane, slots [T] int32) -> None."""


def kv_write(op: KvWriteOp, chip: Chip) -> Callable[[KvWriteArgs], None]:
    """`npu_scatter_pa_kv_cache`; a latent row is a key and a value that lie in two planes."""
    fractal = fractal_cache(chip, op.head_dim, op.v_head_dim, op.kv_dtype)
    store = _fractal_store() if fractal else plain_store()
    latent = not op.v_head_dim and latent_cache(chip, op.head_dim, op.kv_dtype)

    def run(args: KvWriteArgs) -> None:
        key, value = args.key, args.value
        if latent:
            key, value = key.split((LATENT_DIM, op.head_dim - LATENT_DIM), dim=-1)
        assert value is not None and isinstance(args.plan, AscendPlan)
        write(store, args.plan, (key, value), args.cache, fractal=fractal)

    return run


def write(
    store: Store, plan: AscendPlan, new: tuple[Tensor, Tensor], cache: LayerCache, *, fractal: bool = False
) -> None:
    """Stores every token that has a slot. The call knows no "nowhere", so a token without one repeats a write."""
    if not len(new[0]):
        return
    if not plan.maybe_padded:
        store(new[0].contiguous(), new[1].contiguous(), cache[0], cache[1], plan.slots)
        return
    rows, targets, some = plan.rows, plan.targets, plan.any_target
    assert rows is not None and targets is not None and some is not None
    # Where no token at all has a slot, what is there is written back.
    kept = [
        torch.where(some.view(1, 1, 1), x.index_select(0, rows), _tokens(plane, targets, x.shape[1], fractal))
        for x, plane in zip(new, cache, strict=True)
    ]
    store(kept[0], kept[1], cache[0], cache[1], targets)


def plain_store() -> Store:
    """The store of token-major planes."""
    vendor = npu()

    def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        vendor.npu_scatter_pa_kv_cache(
            key=key, value=value, key_cache=keys, value_cache=values, slot_mapping=slots, cache_mode="Norm"
        )

    return store


def _fractal_store() -> Store:
    vendor = npu()

    def store(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        vendor._npu_reshape_and_cache(key=key, value=value, key_cache=keys, value_cache=values, slot_indices=slots)

    return store


def _tokens(plane: Tensor, slots: Tensor, heads: int, fractal: bool) -> Tensor:
    """[n, heads, dim]: what stands in the slots of a plane."""
    if not fractal:
        return plane.flatten(0, 1).index_select(0, slots)
    size = plane.shape[2]
    rows = plane[slots.long() // size, :, slots.long() % size]
    tokens: Tensor = rows.flatten(1).unflatten(1, (heads, -1))
    return tokens


def move_tokens(op: MoveTokensOp) -> Callable[[MoveTokensArgs], None]:
    """Gathers every source, then scatters, in a layout of this package."""
    fractal = is_fractal(op.layout)

    def run(args: MoveTokensArgs) -> None:
        moved = (args.source_slots >= 0) & (args.target_slots >= 0)
        first = moved.int().argmax()
        index = torch.where(moved, torch.arange(len(moved), device=moved.device), first)
        sources = args.source_slots.index_select(0, index).clamp(min=0).long()
        # Where no pair moves, a slot is copied onto itself.
        targets = torch.where(moved.any(), args.target_slots.index_select(0, index).long(), sources)
        for plane in args.cache:
            if fractal:
                size = plane.shape[2]
                plane[targets // size, :, targets % size] = plane[sources // size, :, sources % size]
            else:
                flat = plane.flatten(0, 1)
                flat.index_copy_(0, targets, flat.index_select(0, sources))

    return run


def export_blocks(op: ExportBlocksOp) -> Callable[[ExportBlocksArgs], tuple[Tensor, ...]]:
    """Blocks in the canonical form: fractals become heads, the two parts of a latent row become one."""

    def run(args: ExportBlocksArgs) -> tuple[Tensor, ...]:
        ids = args.block_ids.long()
        planes = [plane.index_select(0, ids) for plane in args.cache]
        if is_fractal(op.layout):
            return tuple(_from_fractal(plane, _heads(op.layout)) for plane in planes)
        return (torch.cat(planes, dim=-1).flatten(0, 1),)

    return run


def import_blocks(op: ImportBlocksOp) -> Callable[[ImportBlocksArgs], None]:
    """The way back of `export_blocks`."""
    size = op.layout.block_size

    def run(args: ImportBlocksArgs) -> None:
        ids = args.block_ids.long()
        if is_fractal(op.layout):
            parts = [_to_fractal(plane, size) for plane in args.planes]
        else:
            blocks = args.planes[0].unflatten(0, (-1, size))
            parts = list(blocks.split((LATENT_DIM, blocks.shape[-1] - LATENT_DIM), dim=-1))
        for plane, part in zip(args.cache, parts, strict=True):
            plane.index_copy_(0, ids, part)

    return run


def _heads(layout: KVLayout) -> int:
    """Heads of a fractal layout, which its id names: "ascend/nz/128/8x64/float16"."""
    return int(layout.id.split("/")[3].partition("x")[0])


def _from_fractal(plane: Tensor, heads: int) -> Tensor:
    """[blocks * block_size, heads, dim] of [blocks, heads * dim / 16, block_size, 16]."""
    tokens: Tensor = plane.transpose(1, 2).flatten(2).unflatten(2, (heads, -1)).flatten(0, 1)
    return tokens


def _to_fractal(tokens: Tensor, block_size: int) -> Tensor:
    """[blocks, heads * dim / 16, block_size, 16] of [blocks * block_size, heads, dim]."""
    blocks: Tensor = tokens.flatten(1).unflatten(0, (-1, block_size)).unflatten(2, (-1, FRACTAL))
    return blocks.transpose(1, 2).contiguous()
