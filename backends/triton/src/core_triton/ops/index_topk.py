"""index_topk: scores by a kernel, the choice by torch's own selection, which sorts only what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import Capture, Verdict
from core.backend.ops import Determinism, IndexTopkArgs, IndexTopkOp
from core.spec import DType
from core_triton.ops.caches import CACHE_WORDS, cache_words, page_of, refuse_cache
from core_triton.ops.refusals import FLOATS, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__: list[str] = []

_NOBODY = torch.iinfo(torch.int64).min


def _tuning(dtype: DType, target: Target) -> Tuning:
    return tunings("index_topk", target)["scores_f32" if dtype is DType.FLOAT32 else "scores"]


def _constants(op: IndexTopkOp, tuning: Tuning, page: int) -> dict[str, Any]:
    return {
        "DIM": op.head_dim,
        "PAGE": page,
        "BLOCK_M": tuning["BLOCK_M"],
        "BLOCK_N": tuning["BLOCK_N"],
        "BLOCK_D": max(16, power_of_two(op.head_dim)),
    }


class _IndexTopk:
    """The bound operation."""

    def __init__(self, op: IndexTopkOp, target: Target) -> None:
        self._op, self._tuning = op, _tuning(op.dtype, target)

    def __call__(self, args: IndexTopkArgs) -> Tensor:
        op, tokens = self._op, args.query.shape[0]
        width = args.plan.block_table.shape[1] * page_of(args.cache)
        out = torch.full((tokens, op.top_k), -1, dtype=torch.int32, device=args.query.device)
        # As many tokens at a time as leave the scores small.
        step = max(1, self._tuning["scores"] // width)
        for first in range(0, tokens, step):
            self._choose(args, out[first : first + step], first, width)
        return out

    def _choose(self, args: IndexTopkArgs, out: Tensor, first: int, width: int) -> None:
        from core_triton.kernels.index_topk import index_scores_kernel

        op, plan, plane = self._op, args.plan, args.cache[0]
        sizes = _constants(op, self._tuning, page_of(args.cache))
        scores = torch.empty((out.shape[0], width), dtype=torch.int64, device=out.device)
        index_scores_kernel[(out.shape[0], -(-width // sizes["BLOCK_N"]))](
            *(args.query, args.weights, plane, scores, plan.query_start_loc, plan.seq_lens, plan.block_table),
            *(plan.batch.num_reqs, first, width, op.num_heads, *args.query.stride()[:2], args.weights.stride(0)),
            *(*plane.stride()[:2], plan.block_table.stride(0)),
            **sizes,
            num_warps=self._tuning.num_warps,
            num_stages=self._tuning.num_stages,
        )
        count = min(op.top_k, width)
        best = torch.topk(scores, count, dim=1).values
        places = 0x7FFFFFFF - (best & 0x7FFFFFFF)
        out[:, :count] = torch.where(best == _NOBODY, -1, places)


def _refuse(op: IndexTopkOp, target: Target) -> str:
    return refuse_form(op) or refuse_cache(op.kv_dtype, target)


def _verdict(op: IndexTopkOp, target: Target) -> Verdict:
    return Verdict.native(capture=Capture.ANY, determinism=Determinism.D3)


_STRIDES = ("q_stride", "q_head_stride", "w_stride", "block_stride", "slot_stride", "table_stride")


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.index_topk import index_scores_kernel

    def build(label: str, dtype: DType, kv_dtype: DType, page: int = 64) -> Build:
        op = IndexTopkOp(dtype=dtype, num_heads=64, head_dim=128, top_k=2048, kv_dtype=kv_dtype)
        tuning = _tuning(dtype, target)
        return Build(
            kernel=index_scores_kernel,
            label=label,
            signature={
                "query": f"*{FLOATS[dtype]}",
                "weights": "*fp32",
                "cache": f"*{CACHE_WORDS[kv_dtype]}",
                "out": "*i64",
                **dict.fromkeys(("starts", "seq_lens", "block_table"), "*i32"),
                **dict.fromkeys(("num_requests", "first_token", "width", "heads", *_STRIDES), "i32"),
            },
            constexprs=_constants(op, tuning, page),
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            matrix=dtype is not DType.FLOAT32,
            divisible=("query", "cache", "out", *_STRIDES[:-1]),
        )

    found = [build(f"scores {word}", dtype, dtype) for dtype, word in FLOATS.items()]
    found.append(build("scores bf16, blocks of 16", DType.BFLOAT16, DType.BFLOAT16, page=16))
    for dtype, word in cache_words(target).items():
        if dtype is not DType.INT8:
            found.append(build(f"scores cache {word}", DType.BFLOAT16, dtype))
    return found


register("index_topk", Kernel(refuse=_refuse, bind=_IndexTopk, builds=_builds, verdict=_verdict))
