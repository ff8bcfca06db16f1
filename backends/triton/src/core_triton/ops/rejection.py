"""rejection_sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from core.backend.ops import RejectionSampleArgs, RejectionSampleOp
from core_triton.ops.refusals import invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.ops.sampling import DRAW_BLOCK
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import tunings

__all__: list[str] = []


def _bind(op: RejectionSampleOp, target: Target) -> Callable[[RejectionSampleArgs], tuple[Tensor, Tensor]]:
    from core_triton.kernels import rejection as kernels

    steps, vocab = op.num_spec_tokens, op.vocab_size
    blocks = -(-vocab // DRAW_BLOCK)
    scan = tunings("vocabulary", target)["scan"]
    certain = not op.has("draft_probs")

    def rejection_sample(args: RejectionSampleArgs) -> tuple[Tensor, Tensor]:
        logits, rows = args.logits, len(args.logits)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        tokens, counts = empty(rows, steps + 1), empty(rows)
        if not rows:
            return tokens, counts
        largests, sums = (empty(rows, steps + 1, dtype=torch.float32) for _ in range(2))
        best_ids, accepted = empty(rows, steps + 1), empty(rows)
        best_scores, best_tokens = empty(rows, 2, blocks, dtype=torch.float32), empty(rows, 2, blocks)
        rests = empty(rows, blocks, dtype=torch.float32)
        probs = logits if args.draft_probs is None else args.draft_probs
        # A draft of no token has no row to point at.
        drafts = args.draft_token_ids if steps else accepted.view(rows, 1)
        strides = logits.stride(0), logits.stride(1)
        kernels.row_facts_kernel[(rows, steps + 1)](
            logits, args.temperature, args.num_draft_tokens, largests, sums, best_ids, steps, vocab, *strides,
            BLOCK=scan["BLOCK"], num_warps=scan.num_warps,
        )  # fmt: skip
        row = (drafts, args.num_draft_tokens, args.temperature, args.seeds, args.positions, probs, largests, sums)
        places = (*strides, drafts.stride(0), probs.stride(0), probs.stride(1))
        kernels.accept_kernel[(rows,)](
            logits, *row, best_ids, accepted, steps, *places,
            HAS_PROBS=not certain, BLOCK=power_of_two(steps + 1), num_warps=1,
        )  # fmt: skip
        kernels.recover_kernel[(rows, blocks)](
            logits, *row, accepted, best_scores, best_tokens, rests, steps, vocab, *places,
            HAS_PROBS=not certain, BLOCK=DRAW_BLOCK, num_warps=4,
        )  # fmt: skip
        kernels.finish_kernel[(rows,)](
            drafts, args.num_draft_tokens, args.temperature, best_ids, accepted, best_scores, best_tokens, rests,
            tokens, counts, steps, blocks, vocab, drafts.stride(0),
            BLOCK=power_of_two(blocks), STEPS=power_of_two(steps + 1), num_warps=1,
        )  # fmt: skip
        return tokens, counts

    return rejection_sample


_ROW = {
    "draft_ids": "*i32", "num_drafts": "*i32", "temperature": "*fp32", "seeds": "*i64", "positions": "*i32",
    "draft_probs": "*fp32", "largests": "*fp32", "sums": "*fp32",
}  # fmt: skip
_STRIDES = dict.fromkeys(("logits_stride", "step_stride", "draft_stride", "probs_stride", "probs_step_stride"), "i32")
_BEST = {"best_scores": "*fp32", "best_tokens": "*i32", "rests": "*fp32"}
_DIVISIBLE = ("logits", "vocab", "logits_stride", "step_stride")


def _builds(target: Target) -> Iterator[Build]:
    from core_triton.kernels import rejection as kernels

    scan = tunings("vocabulary", target)["scan"]
    facts = {"largests": "*fp32", "sums": "*fp32", "best_ids": "*i32", "steps": "i32", "vocab": "i32"}
    yield Build(
        kernel=kernels.row_facts_kernel,
        label="rejection_sample, rows",
        signature={
            "logits": "*fp32", "temperature": "*fp32", "num_drafts": "*i32", **facts,
            "logits_stride": "i32", "step_stride": "i32",
        },
        constexprs={"BLOCK": scan["BLOCK"]},
        num_warps=scan.num_warps,
        divisible=_DIVISIBLE,
    )  # fmt: skip
    yield Build(
        kernel=kernels.accept_kernel,
        label="rejection_sample, accepted",
        signature={"logits": "*fp32", **_ROW, "best_ids": "*i32", "accepted": "*i32", "steps": "i32", **_STRIDES},
        constexprs={"HAS_PROBS": True, "BLOCK": 8},
        num_warps=1,
    )
    yield Build(
        kernel=kernels.recover_kernel,
        label="rejection_sample, draws",
        signature={"logits": "*fp32", **_ROW, "accepted": "*i32", **_BEST, "steps": "i32", "vocab": "i32", **_STRIDES},
        constexprs={"HAS_PROBS": True, "BLOCK": DRAW_BLOCK},
        divisible=_DIVISIBLE,
    )
    yield Build(
        kernel=kernels.finish_kernel,
        label="rejection_sample, tokens",
        signature={
            **{name: _ROW[name] for name in ("draft_ids", "num_drafts", "temperature")},
            "best_ids": "*i32", "accepted": "*i32", **_BEST, "tokens": "*i32", "counts": "*i32",
            **dict.fromkeys(("steps", "num_blocks", "vocab", "draft_stride"), "i32"),
        },
        constexprs={"BLOCK": 128, "STEPS": 8},
        num_warps=1,
    )  # fmt: skip


register(
    "rejection_sample",
    Kernel(
        refuse=lambda op, target: refuse_form(op, ("draft_probs",)),
        bind=_bind,
        builds=lambda target: list(_builds(target)),
        verdict=invariant,
    ),
)
