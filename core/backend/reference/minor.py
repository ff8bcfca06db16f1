"""Reference of the small operations: adapters, moved tokens, and blocks in and out of the canonical form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.backend.layout import KVLayout
from core.backend.ops.minor import (
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    LoraAddArgs,
    LoraAddOp,
    MoveTokensArgs,
    MoveTokensOp,
)
from core.backend.reference.cache import scatter_tokens
from core.backend.reference.dense import product
from core.backend.reference.precision import wide
from core.backend.reference.registry import composite
from core.backend.schemes import raw, take
from core.errors import UnsupportedError

__all__: list[str] = []


@composite("lora_add_")
def make_lora_add_(op: LoraAddOp) -> Callable[[LoraAddArgs], None]:
    """Adapter by adapter over the tokens that use it; the sum is rounded once."""
    acc = wide(op)

    def lora_add_(args: LoraAddArgs) -> None:
        for adapter in range(op.num_adapters):
            rows = torch.where(args.adapter_ids == adapter)[0]
            if len(rows):
                inner = product(op, args.x[rows].to(acc), args.a[adapter].to(acc))
                added = product(op, inner, args.b[adapter].to(acc))
                args.y[rows] = (args.y[rows].to(acc) + added).to(args.y.dtype)

    return lora_add_


@composite("move_tokens")
def make_move_tokens(op: MoveTokensOp) -> Callable[[MoveTokensArgs], None]:
    """Gathers every source, then scatters."""
    _check_canonical(op.name, op.layout)

    def move_tokens(args: MoveTokensArgs) -> None:
        targets = torch.where(args.source_slots < 0, -1, args.target_slots)
        for plane in args.cache:
            flat = raw(plane).flatten(0, 1)
            scatter_tokens(flat, flat.index_select(0, args.source_slots.long().clamp(min=0)), targets)

    return move_tokens


@composite("export_blocks")
def make_export_blocks(op: ExportBlocksOp) -> Callable[[ExportBlocksArgs], tuple[Tensor, ...]]:
    """The blocks' tokens, plane by plane."""
    _check_canonical(op.name, op.layout)

    def export_blocks(args: ExportBlocksArgs) -> tuple[Tensor, ...]:
        return tuple(take(plane, args.block_ids).flatten(0, 1) for plane in args.cache)

    return export_blocks


@composite("import_blocks")
def make_import_blocks(op: ImportBlocksOp) -> Callable[[ImportBlocksArgs], None]:
    """The tokens into the blocks, plane by plane."""
    _check_canonical(op.name, op.layout)

    def import_blocks(args: ImportBlocksArgs) -> None:
        for plane, tokens in zip(args.cache, args.planes, strict=True):
            blocks = raw(tokens).reshape(-1, *plane.shape[1:])
            raw(plane).index_copy_(0, args.block_ids.long(), blocks)

    return import_blocks


def _check_canonical(name: str, layout: KVLayout) -> None:
    if not layout.canonical:
        raise UnsupportedError(
            name, f"composites cannot read the private KV layout {layout.id!r}", "the backend must bind it natively"
        )
