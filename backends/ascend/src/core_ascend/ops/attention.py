"""Attention over the paged cache and over the step's own keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import AttentionArgs, AttentionOp
from core_ascend.chips import Chip
from core_ascend.launches import note
from core_ascend.layouts import FRACTAL
from core_ascend.plan import AscendPlan, causal_mask
from core_ascend.vendor import FRACTAL_NZ, npu

__all__ = ["CAUSAL", "UNMASKED", "WINDOWED", "attention"]

UNMASKED = 0
"""Every key, and no mask at all."""
CAUSAL = 3
"""Right-down causal: the last query sees the last key."""
WINDOWED = 4
"""A band: query p sees keys [p - pre_tokens, p + next_tokens]."""


def attention(op: AttentionOp, chip: Chip) -> Callable[[AttentionArgs], Tensor]:
    """One call for prefill, chunk, decode and mixed steps."""
    if not chip.fused_attention:
        return _split_fused(op)
    return _fused_v2(op) if op.has("sinks") else _fused(op)


def _masking(op: AttentionOp, device: torch.device) -> dict[str, Any]:
    if not op.causal:
        return {"sparse_mode": UNMASKED}
    if op.window:
        # The band counts the keys before a query, the contract's window the query too.
        edges = {"pre_tokens": op.window - 1, "next_tokens": 0}
        return {"sparse_mode": WINDOWED, "atten_mask": causal_mask(device), **edges}
    return {"sparse_mode": CAUSAL, "atten_mask": causal_mask(device)}


def _operands(op: AttentionOp, args: AttentionArgs) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(keys, values, paging): planes as [blocks, block_size, heads * dim], or the step's own tokens."""
    if args.cache is None:
        assert args.key is not None and args.value is not None, "ragged attention needs key and value"
        return args.key.contiguous(), args.value.contiguous(), {}
    keys, values = (plane.flatten(2) for plane in args.cache)
    return keys, values, {"block_table": args.plan.block_table, "block_size": args.plan.block_size}


def _kv_lens(args: AttentionArgs, plan: AscendPlan) -> list[int]:
    """Lengths a request in the cache; cumulative ones where the keys are the step's own tokens."""
    return plan.query_ends if args.cache is None else plan.kv_lens


def _fused(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    vendor = npu()

    def run(args: AttentionArgs) -> Tensor:
        plan, query = args.plan, args.query.contiguous()
        assert isinstance(plan, AscendPlan)
        if not len(query):
            return query.new_empty(0, op.num_heads, op.v_head_dim)
        keys, values, paging = _operands(op, args)
        note(lambda: {"actual_seq_lengths": plan.query_ends, "actual_seq_lengths_kv": _kv_lens(args, plan)})
        out, lse = vendor.npu_fused_infer_attention_score(
            query,
            keys,
            values,
            input_layout="TND",
            num_heads=op.num_heads,
            num_key_value_heads=op.num_kv_heads,
            scale=op.scale,
            actual_seq_lengths=plan.query_ends,
            actual_seq_lengths_kv=_kv_lens(args, plan),
            softmax_lse_flag=args.lse is not None,
            **_masking(op, query.device),
            **paging,
        )
        return _finished(args, plan, out, lse)

    return run


def _fused_v2(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    vendor = npu()

    def run(args: AttentionArgs) -> Tensor:
        plan, query = args.plan, args.query.contiguous()
        assert isinstance(plan, AscendPlan) and args.sinks is not None
        if not len(query):
            return query.new_empty(0, op.num_heads, op.v_head_dim)
        keys, values, paging = _operands(op, args)
        note(lambda: {"actual_seq_qlen": plan.query_ends, "actual_seq_kvlen": _kv_lens(args, plan)})
        out, lse = vendor.npu_fused_infer_attention_score_v2(
            query,
            keys,
            values,
            input_layout="TND",
            num_query_heads=op.num_heads,
            num_key_value_heads=op.num_kv_heads,
            softmax_scale=op.scale,
            actual_seq_qlen=plan.query_ends,
            actual_seq_kvlen=_kv_lens(args, plan),
            learnable_sink=args.sinks.to(torch.bfloat16),
            **_masking(op, query.device),
            **paging,
        )
        return _finished(args, plan, out, lse)

    return run


def _finished(args: AttentionArgs, plan: AscendPlan, out: Tensor, lse: Tensor) -> Tensor:
    """Log-sum-exp into its place, and nothing that a padding request may have read."""
    if args.lse is not None:
        args.lse.copy_(lse.view(args.lse.shape))
    if plan.maybe_padded and plan.padding is not None and args.cache is not None:
        return out.masked_fill_(plan.padding, 0.0)
    return out


def _split_fused(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    """The call of older chips: chunks and decodes together, lengths as tensors on the host."""
    vendor = npu()

    def run(args: AttentionArgs) -> Tensor:
        plan, query = args.plan, args.query.contiguous()
        assert isinstance(plan, AscendPlan) and args.cache is not None
        out = torch.empty(len(query), op.num_heads, op.v_head_dim, dtype=query.dtype, device=query.device)
        if not len(query):
            return out
        starts = [0, *plan.query_ends[:-1]]
        counts = [end - start for start, end in zip(starts, plan.query_ends, strict=True)]
        vendor._npu_paged_attention_splitfuse(
            query=query,
            key_cache=args.cache[0],
            value_cache=args.cache[1],
            mask=_additive_mask(op, plan, query.dtype),
            block_table=plan.block_table,
            seq_len=torch.tensor(counts, dtype=torch.int32),
            context_lens=torch.tensor(plan.kv_lens, dtype=torch.int32),
            scale_value=op.scale,
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            out=out,
        )
        return _finished(args, plan, out, out)

    return run


def _additive_mask(op: AttentionOp, plan: AscendPlan, dtype: torch.dtype) -> Tensor:
    """[1, keys / 16, tokens, 16] in fractals: 0 where a token sees a key, the lowest number where it does not."""
    positions = plan.batch.positions.long()[:, None]
    keys_at = torch.arange(_whole_fractals(max(plan.kv_lens)), device=positions.device)
    seen = keys_at <= positions
    if op.window:
        seen &= keys_at > positions - op.window
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    mask = torch.nn.functional.pad(mask, (0, 0, 0, -len(mask) % FRACTAL))
    fractals = mask.unflatten(1, (-1, FRACTAL)).transpose(0, 1)[None].contiguous()
    cast: Tensor = npu().npu_format_cast(fractals, FRACTAL_NZ)
    return cast


def _whole_fractals(count: int) -> int:
    return -(-count // FRACTAL) * FRACTAL
