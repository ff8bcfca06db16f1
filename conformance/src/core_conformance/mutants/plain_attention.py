"""Attention over a paged cache as kernels do it, tile by tile with a running maximum; honest unless told otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp
from core.backend.reference.cache import Span, owned_keys, spans
from core_conformance.mutants.backend import Maker
from core_conformance.subject import oracle

__all__ = ["Form", "plain_attention"]


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the kernel goes about it.

    Args:
        tile: Keys of a tile, of the record.
        newest_first: Whether tiles are taken from the last to the first.
        half_weights: Whether probabilities are rounded to the model's type before they meet the values.
        half_logits: Whether logits are rounded to the model's type; a bug.
        base2: Whether powers are of 2, with log2(e) in the scale.
        subtract_peak: Whether the maximum is subtracted; it must be.
        blank_unseen: Whether values that nobody sees are replaced by zeros; they must be, since 0 * NaN is NaN.
    """

    tile: Callable[[AttentionArgs], int] = lambda args: 1 << 20
    newest_first: bool = False
    half_weights: bool = False
    half_logits: bool = False
    base2: bool = False
    subtract_peak: bool = True
    blank_unseen: bool = True


def plain_attention(form: Form) -> Maker:
    """The kernel for causal attention without features over a cache in the model's type; the reference for the rest."""

    def make(op: AttentionOp) -> Callable[[Any], Any]:
        if op.features or not op.causal or op.kv_dtype is not op.dtype:
            return oracle(op)

        def attention(args: AttentionArgs) -> Tensor:
            out = args.query.new_zeros((*args.query.shape[:2], op.v_head_dim))
            for span in spans(args.plan):
                out[span.start : span.end] = _attend(op, args, span, form)
            return out

        return attention

    return make


def _attend(op: AttentionOp, args: AttentionArgs, span: Span, form: Form) -> Tensor:
    """[n, num_heads, v_head_dim] of the request's n queries."""
    assert args.cache is not None
    (key, owned), (value, _) = (owned_keys(plane, args.plan, span) for plane in args.cache)
    if not form.blank_unseen:
        value = _with_unowned(args.cache[1], args, span)
    repeat = op.num_heads // op.num_kv_heads
    key, value = (x.float().repeat_interleave(repeat, dim=1) for x in (key, value))
    query = args.query[span.start : span.end].float()
    logits = torch.einsum("qhd,khd->hqk", query, key) * op.scale
    if op.softcap:
        logits = op.softcap * torch.tanh(logits / op.softcap)
    if form.half_logits:
        logits = logits.to(torch_dtype(op.dtype)).float()
    at, position = torch.arange(span.seq_len), torch.arange(span.first_position, span.seq_len)[:, None]
    seen = owned[: span.seq_len] & (at <= position)
    if op.window:
        seen &= at > position - op.window
    logits = torch.where(seen, logits, -math.inf)
    weight_dtype = torch_dtype(op.dtype) if form.half_weights else torch.float32
    return _tiled(logits, value, form, form.tile(args), weight_dtype).to(args.query.dtype)


def _with_unowned(plane: Tensor, args: AttentionArgs, span: Span) -> Tensor:
    """Values with whatever lies in the null block."""
    size = args.plan.block_size
    blocks = args.plan.block_table[span.index, : -(-span.seq_len // size)]
    return plane.index_select(0, blocks.long()).flatten(0, 1)[: span.seq_len]


def _tiled(logits: Tensor, value: Tensor, form: Form, tile: int, weight_dtype: torch.dtype) -> Tensor:
    """[n, heads, dim] of logits [heads, n, keys] and values [keys, heads, dim]."""
    if form.base2:
        logits = logits * math.log2(math.e)
    power = torch.exp2 if form.base2 else torch.exp
    shape = logits.shape[:2]
    peak = torch.full((*shape, 1), -math.inf)
    total, mixed = torch.zeros(*shape, 1), torch.zeros(*shape, value.shape[-1])
    begins = list(range(0, logits.shape[2], tile))
    for begin in reversed(begins) if form.newest_first else begins:
        part = logits[:, :, begin : begin + tile]
        higher = torch.maximum(peak, part.amax(-1, keepdim=True))
        offset = torch.where(higher == -math.inf, 0.0, higher) if form.subtract_peak else torch.zeros_like(higher)
        weights = power(part - offset)
        keep = power(peak - offset) if form.subtract_peak else torch.ones_like(total)
        total = total * keep + weights.sum(-1, keepdim=True)
        rounded = weights.to(weight_dtype).float()
        mixed = mixed * keep + torch.einsum("hqk,khd->hqd", rounded, value[begin : begin + tile])
        peak = higher
    return (mixed / torch.where(total == 0, 1.0, total)).transpose(0, 1)
