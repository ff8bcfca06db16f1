"""sample, apply_token_bitmask and advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from core.backend.ops import (
    AdvanceArgs,
    AdvanceOp,
    ApplyTokenBitmaskArgs,
    ApplyTokenBitmaskOp,
    SampleArgs,
    SampleOp,
)
from core_triton.ops.refusals import invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import tunings

__all__ = ["DRAW_BLOCK"]

DRAW_BLOCK = 1024
"""Tokens of a program that draws."""
_STATE_BLOCK = 64
"""Requests of a program that moves states on."""
_FILTERS = ("top_k", "top_p", "min_p")
_VOCAB = 128256
"""A vocabulary of everyday size, for builds."""


def _bind_sample(op: SampleOp, target: Target) -> Callable[[SampleArgs], Tensor]:
    from core_triton.kernels.sample import best_kernel, draw_kernel, threshold_kernel

    blocks = -(-op.vocab_size // DRAW_BLOCK)
    filtered = bool(op.features)
    scan = tunings("vocabulary", target)["scan"]

    def sample(args: SampleArgs) -> Tensor:
        logits, rows = args.logits, len(args.logits)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        out = empty(rows)
        if not rows:
            return out
        keys, last_ties, best_ids = (empty(rows, count) for count in (1, 1, blocks))
        best_scores = empty(rows, blocks, dtype=torch.float32)
        if filtered:
            filters = [args.temperature if x is None else x for x in (args.top_k, args.top_p, args.min_p)]
            threshold_kernel[(rows,)](
                logits, args.temperature, *filters, keys, last_ties, op.vocab_size, logits.stride(0),
                HAS_TOP_K=op.has("top_k"), HAS_TOP_P=op.has("top_p"), HAS_MIN_P=op.has("min_p"),
                BLOCK=scan["BLOCK"], CUTS=scan["CUTS"], num_warps=scan.num_warps,
            )  # fmt: skip
        draw_kernel[(rows, blocks)](
            logits, args.temperature, args.seeds, args.positions, keys, last_ties, best_scores, best_ids,
            op.vocab_size, logits.stride(0), FILTERED=filtered, BLOCK=DRAW_BLOCK, num_warps=4,
        )  # fmt: skip
        best_kernel[(rows,)](best_scores, best_ids, out, blocks, op.vocab_size, BLOCK=power_of_two(blocks), num_warps=1)
        return out

    return sample


def _bind_bitmask(op: ApplyTokenBitmaskOp, target: Target) -> Callable[[ApplyTokenBitmaskArgs], None]:
    from core_triton.kernels.sample import bitmask_kernel

    blocks = -(-op.vocab_size // DRAW_BLOCK)

    def apply_token_bitmask(args: ApplyTokenBitmaskArgs) -> None:
        if len(args.logits):
            bitmask_kernel[(len(args.logits), blocks)](
                args.logits, args.bitmask, op.vocab_size, args.logits.stride(0), args.bitmask.stride(0),
                BLOCK=DRAW_BLOCK, num_warps=4,
            )  # fmt: skip

    return apply_token_bitmask


def _bind_advance(op: AdvanceOp, target: Target) -> Callable[[AdvanceArgs], None]:
    from core_triton.kernels.advance import advance_kernel, slots_kernel

    def advance(args: AdvanceArgs) -> None:
        rows = len(args.token_ids)
        if not rows:
            return
        grid = (-(-rows // _STATE_BLOCK),)
        advance_kernel[grid](
            args.token_ids, args.positions, args.seq_lens, args.sampled, args.num_accepted, rows,
            args.sampled.stride(0), BLOCK=_STATE_BLOCK, num_warps=1,
        )  # fmt: skip
        for table, slots, size in zip(args.block_tables, args.slots, op.block_sizes, strict=True):
            slots_kernel[grid](
                args.positions, args.num_accepted, table, slots, rows, table.shape[1], table.stride(0),
                SIZE=size, BLOCK=_STATE_BLOCK, num_warps=1,
            )  # fmt: skip

    return advance


def _sample_builds(target: Target) -> Iterator[Build]:
    from core_triton.kernels.sample import best_kernel, draw_kernel, threshold_kernel

    scan = tunings("vocabulary", target)["scan"]
    yield Build(
        kernel=threshold_kernel,
        label="sample thresholds",
        signature={
            "logits": "*fp32", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32",
            "keys": "*i32", "last_ties": "*i32", "vocab": "i32", "logits_stride": "i32",
        },
        constexprs={"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True, **scan.sizes},
        num_warps=scan.num_warps,
        divisible=("logits", "vocab", "logits_stride"),
    )  # fmt: skip
    yield Build(
        kernel=draw_kernel,
        label="sample draws",
        signature={
            "logits": "*fp32", "temperature": "*fp32", "seeds": "*i64", "positions": "*i32", "keys": "*i32",
            "last_ties": "*i32", "best_scores": "*fp32", "best_ids": "*i32", "vocab": "i32", "logits_stride": "i32",
        },
        constexprs={"FILTERED": True, "BLOCK": DRAW_BLOCK},
        divisible=("logits", "vocab", "logits_stride"),
    )  # fmt: skip
    yield Build(
        kernel=best_kernel,
        label="sample, best of the blocks",
        signature={"best_scores": "*fp32", "best_ids": "*i32", "out": "*i32", "num_blocks": "i32", "vocab": "i32"},
        constexprs={"BLOCK": power_of_two(-(-_VOCAB // DRAW_BLOCK))},
        num_warps=1,
    )


def _bitmask_builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.sample import bitmask_kernel

    sizes = {"vocab": "i32", "logits_stride": "i32", "bitmask_stride": "i32"}
    return [
        Build(
            kernel=bitmask_kernel,
            label="apply_token_bitmask",
            signature={"logits": "*fp32", "bitmask": "*i32", **sizes},
            constexprs={"BLOCK": DRAW_BLOCK},
            divisible=("logits", "vocab", "logits_stride"),
        )
    ]


def _advance_builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.advance import advance_kernel, slots_kernel

    state = ("token_ids", "positions", "seq_lens", "sampled", "num_accepted")
    return [
        Build(
            kernel=advance_kernel,
            label="advance",
            signature={**dict.fromkeys(state, "*i32"), "num_rows": "i32", "sampled_stride": "i32"},
            constexprs={"BLOCK": _STATE_BLOCK},
            num_warps=1,
        ),
        Build(
            kernel=slots_kernel,
            label="advance, slots",
            signature={
                **dict.fromkeys(("positions", "num_accepted", "table", "slots"), "*i32"),
                **dict.fromkeys(("num_rows", "num_blocks", "table_stride"), "i32"),
            },
            constexprs={"SIZE": 16, "BLOCK": _STATE_BLOCK},
            num_warps=1,
        ),
    ]


def _refuse_advance(op: AdvanceOp, target: Target) -> str:
    return f"no kernel with {', '.join(sorted(op.features))}" if op.features else ""


register(
    "sample",
    Kernel(
        refuse=lambda op, target: refuse_form(op, _FILTERS),
        bind=_bind_sample,
        builds=lambda target: list(_sample_builds(target)),
        verdict=invariant,
    ),
)
register(
    "apply_token_bitmask",
    Kernel(refuse=lambda op, target: refuse_form(op), bind=_bind_bitmask, builds=_bitmask_builds, verdict=invariant),
)
register("advance", Kernel(refuse=_refuse_advance, bind=_bind_advance, builds=_advance_builds, verdict=invariant))
