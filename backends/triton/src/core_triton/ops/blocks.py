"""Blocks and tokens of caches, copied as words of memory: export_blocks, import_blocks, move_tokens, and pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.backend.ops import (
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    MoveTokensArgs,
    MoveTokensOp,
)
from core_triton.ops.refusals import invariant
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__ = ["copy_rows"]

_MOST_WORDS = 1024


def _words(x: Tensor) -> Tensor:
    """[rows, words] over the same memory: 4 bytes a word where rows divide, else 1."""
    rows = x.reshape(x.shape[0], -1).view(torch.uint8)
    assert rows.data_ptr() == x.data_ptr(), "rows that are copied must be contiguous in themselves"
    wide = rows.shape[1] % 4 == 0 and rows.data_ptr() % 4 == 0 and rows.stride(0) % 4 == 0
    return rows.view(torch.int32) if wide else rows


def copy_rows(
    source: Tensor,
    target: Tensor,
    count: int,
    *,
    sources: Tensor | None = None,
    targets: Tensor | None = None,
    skips: Tensor | None = None,
) -> None:
    """target[targets[i]] = source[sources[i]] for i < count; no row may be both read and written.

    Args:
        source: [rows, ...], each row contiguous.
        target: As source, with rows of the same size and type.
        sources: [count], int32, device; None for 0, 1, 2, ...
        targets: As sources; a negative one is written nowhere.
        skips: [count], int32: where negative, nothing is copied.
    """
    from core_triton.kernels.blocks import copy_rows_kernel

    if not count or not source.numel():
        return
    from_, to = _words(source), _words(target)
    if from_.dtype != to.dtype:
        from_, to = from_.view(torch.uint8), to.view(torch.uint8)
    width = from_.shape[1]
    block = min(_MOST_WORDS, power_of_two(width))
    copy_rows_kernel[(count, -(-width // block))](
        from_,
        to,
        from_ if sources is None else sources,
        to if targets is None else targets,
        to if skips is None else skips,
        width,
        from_.stride(0),
        to.stride(0),
        SOURCES=sources is not None,
        TARGETS=targets is not None,
        SKIPS=skips is not None,
        BLOCK=block,
        num_warps=4,
    )


def _bind_export(op: ExportBlocksOp, target: Target) -> Callable[[ExportBlocksArgs], tuple[Tensor, ...]]:
    def export_blocks(args: ExportBlocksArgs) -> tuple[Tensor, ...]:
        return tuple(_exported(plane, args.block_ids) for plane in args.cache)

    return export_blocks


def _exported(plane: Tensor, block_ids: Tensor) -> Tensor:
    count = block_ids.shape[0]
    out = torch.empty((count, *plane.shape[1:]), dtype=plane.dtype, device=plane.device)
    copy_rows(plane, out, count, sources=block_ids)
    return out.flatten(0, 1)


def _bind_import(op: ImportBlocksOp, target: Target) -> Callable[[ImportBlocksArgs], None]:
    def import_blocks(args: ImportBlocksArgs) -> None:
        for plane, tokens in zip(args.cache, args.planes, strict=True):
            blocks = tokens.contiguous().view(-1, *plane.shape[1:])
            copy_rows(blocks, plane, args.block_ids.shape[0], targets=args.block_ids)

    return import_blocks


def _bind_move(op: MoveTokensOp, target: Target) -> Callable[[MoveTokensArgs], None]:
    def move_tokens(args: MoveTokensArgs) -> None:
        count = args.source_slots.shape[0]
        for plane in args.cache:
            slots = plane.flatten(0, 1)
            # A slot may be source of one pair and target of another: all are read first.
            held = torch.empty((count, *slots.shape[1:]), dtype=slots.dtype, device=slots.device)
            copy_rows(slots, held, count, sources=args.source_slots)
            copy_rows(held, slots, count, targets=args.target_slots, skips=args.source_slots)

    return move_tokens


def _refuse(op: ExportBlocksOp | ImportBlocksOp | MoveTokensOp, target: Target) -> str:
    if not op.layout.canonical:
        return f"no kernel over the layout {op.layout.id}"
    return f"no kernel with {', '.join(sorted(op.features))}" if op.features else ""


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.blocks import copy_rows_kernel

    return [
        Build(
            kernel=copy_rows_kernel,
            label=f"rows of {word}{' moved' if moved else ''}",
            signature={
                "source": f"*{word}",
                "target": f"*{word}",
                **dict.fromkeys(("sources", "targets", "skips"), "*i32"),
                **dict.fromkeys(("width", "source_stride", "target_stride"), "i32"),
            },
            constexprs={"SOURCES": not moved, "TARGETS": True, "SKIPS": moved, "BLOCK": _MOST_WORDS},
            num_warps=4,
            num_stages=2,
            divisible=("source", "target"),
        )
        for word in ("i32", "u8")
        for moved in (False, True)
    ]


register("export_blocks", Kernel(refuse=_refuse, bind=_bind_export, builds=_builds, verdict=invariant))
register("import_blocks", Kernel(refuse=_refuse, bind=_bind_import, builds=lambda target: (), verdict=invariant))
register("move_tokens", Kernel(refuse=_refuse, bind=_bind_move, builds=lambda target: (), verdict=invariant))
