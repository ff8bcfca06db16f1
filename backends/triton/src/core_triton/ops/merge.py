"""merge_lse, and the last pass of attention whose keys were cut into parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import MergeLseArgs, MergeLseOp
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__ = ["join_parts"]

_MOST_PARTS = 128


def join_parts(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None, sinks: Tensor | None = None) -> None:
    """Writes attention over all parts.

    Args:
        outs: [parts, T, heads, dim], contiguous.
        lses: [parts, T, heads], float32, contiguous; -inf where a part saw no key.
        out: [T, heads, dim], contiguous, written.
        lse: [T, heads], float32, contiguous, written.
        sinks: [heads], float32: joins the denominator.
    """
    from core_triton.kernels.merge import merge_kernel

    parts, tokens, heads, dim = outs.shape
    if not tokens:
        return
    merge_kernel[(tokens * heads,)](
        outs,
        lses,
        lses if sinks is None else sinks,
        out,
        lses if lse is None else lse,
        tokens * heads,
        parts,
        heads,
        DIM=dim,
        SINKS=sinks is not None,
        LSE=lse is not None,
        PARTS=power_of_two(parts),
        BLOCK=power_of_two(dim),
        num_warps=_warps(power_of_two(parts) * power_of_two(dim)),
    )


def _warps(elements: int) -> int:
    """Warps that sum that many numbers: a thread holds no more than 64 of them."""
    return min(16, max(2, elements // 2048))


def _bind(op: MergeLseOp, target: Target) -> Callable[[MergeLseArgs], tuple[Tensor, Tensor]]:
    dtype = torch_dtype(op.dtype)

    def merge_lse(args: MergeLseArgs) -> tuple[Tensor, Tensor]:
        _, tokens, heads, dim = args.outs.shape
        out = torch.empty((tokens, heads, dim), dtype=dtype, device=args.outs.device)
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=args.outs.device)
        join_parts(args.outs.contiguous(), args.lses.contiguous(), out, lse)
        return out, lse

    return merge_lse


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.merge import merge_kernel

    def build(label: str, part: str, out: str, dim: int, parts: int, sinks: bool) -> Build:
        pointers = {"outs": f"*{part}", "lses": "*fp32", "sinks": "*fp32", "out": f"*{out}", "lse": "*fp32"}
        return Build(
            kernel=merge_kernel,
            label=label,
            signature={**pointers, "num_rows": "i32", "num_parts": "i32", "heads": "i32"},
            constexprs={"DIM": dim, "SINKS": sinks, "LSE": True, "PARTS": parts, "BLOCK": dim},
            num_warps=_warps(parts * dim),
            num_stages=2,
            divisible=("outs", "out"),
        )

    return [
        *(build(f"merge_lse {word}", word, word, 128, 2, False) for word in FLOATS.values()),
        build("parts of decode", "fp32", "bf16", 128, 32, True),
        build("parts of mla", "fp32", "bf16", 512, 32, False),
    ]


register(
    "merge_lse",
    Kernel(refuse=lambda op, target: refuse_form(op), bind=_bind, builds=_builds, verdict=invariant),
)
