"""Kernels with one bug each, over the reference; and honest kernels that round in other places."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed, torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, KvWriteArgs, LinearArgs, LinearOp, RopeArgs
from core.backend.reference import COMPOSITES
from core.backend.reference.cache import Span, owned_keys, spans
from core_conformance.mutants.backend import Maker

__all__ = [
    "attention_with",
    "blocked_attention",
    "changed_op",
    "head_map_transposed",
    "linear_drops_tail",
    "minus_one_to_slot_zero",
    "rope_off_by_one",
    "split_k_linear",
]

Call = Callable[[Any], Any]


def changed_op(name: str, **changes: Callable[[Any], Any]) -> Maker:
    """The reference of an operation whose static parameters were changed: field to function of the OpSpec."""

    def make(op: Any) -> Call:
        made: Call = COMPOSITES[name](dataclasses.replace(op, **{field: fn(op) for field, fn in changes.items()}))
        return made

    return make


def attention_with(last_key: int) -> Maker:
    """Attention in which each query sees `last_key` keys more (or, negative, fewer) than it should."""

    def make(op: AttentionOp) -> Call:
        honest = COMPOSITES["attention"](op)

        def attention(args: AttentionArgs) -> Tensor:
            out: Tensor = honest(args)
            if args.cache is None or not op.causal:
                return out
            for span in spans(args.plan):
                for token in range(span.start, span.end):
                    seen = span.first_position + token - span.start + 1
                    shifted = min(max(seen + last_key, 1), span.seq_len)
                    if shifted != seen:
                        out[token] = _attend(op, args, span, token, seen=shifted)
            return out

        return attention

    return make


def head_map_transposed(op: AttentionOp) -> Call:
    """Query head h reads key head h % num_kv_heads."""
    honest = COMPOSITES["attention"](op)
    group = op.num_heads // op.num_kv_heads
    order = torch.arange(op.num_heads).view(group, op.num_kv_heads).T.flatten()

    def attention(args: AttentionArgs) -> Tensor:
        out = honest(dataclasses.replace(args, query=args.query[:, order]))
        back = torch.empty_like(out)
        back[:, order] = out
        return back

    return attention


def blocked_attention(tile: int, *, half_weights: bool) -> Maker:
    """Attention tile by tile with a running maximum, from the last tile to the first; honest.

    Args:
        tile: Keys of a tile.
        half_weights: Whether probabilities are rounded to the model's type before they meet the values.
    """

    def make(op: AttentionOp) -> Call:
        if op.features or op.softcap or not op.causal:
            made: Call = COMPOSITES["attention"](op)
            return made

        def attention(args: AttentionArgs) -> Tensor:
            out = args.query.new_zeros((*args.query.shape[:2], op.v_head_dim))
            for span in spans(args.plan):
                for token in range(span.start, span.end):
                    seen = span.first_position + token - span.start + 1
                    out[token] = _attend(op, args, span, token, seen=seen, tile=tile, half=half_weights)
            return out

        return attention

    return make


def _attend(
    op: AttentionOp, args: AttentionArgs, span: Span, token: int, *, seen: int, tile: int = 0, half: bool = False
) -> Tensor:
    """[num_heads, v_head_dim] of one query over its keys [first, seen)."""
    assert args.cache is not None
    first = max(0, span.first_position + token - span.start + 1 - op.window) if op.window else 0
    parts = [owned_keys(plane, args.plan, dataclasses.replace(span, seq_len=seen), first) for plane in args.cache]
    (key, owned), (value, _) = parts
    if not owned.any():
        return args.query.new_zeros(op.num_heads, op.v_head_dim)
    repeat = op.num_heads // op.num_kv_heads
    key, value = (x.float().repeat_interleave(repeat, dim=1) for x in (key[owned], value[owned]))
    logits = torch.einsum("hd,khd->hk", args.query[token].float(), key) * op.scale
    if op.softcap:
        logits = op.softcap * torch.tanh(logits / op.softcap)
    mixed = _tiled(logits, value, tile or len(key), torch_dtype(op.dtype) if half else torch.float32)
    return mixed.to(args.query.dtype)


def _tiled(logits: Tensor, value: Tensor, tile: int, weight_dtype: torch.dtype) -> Tensor:
    peak = torch.full((len(logits), 1), -math.inf)
    total, mixed = torch.zeros(len(logits), 1), torch.zeros(len(logits), value.shape[-1])
    for begin in reversed(range(0, logits.shape[1], tile)):
        part = logits[:, begin : begin + tile]
        higher = torch.maximum(peak, part.amax(-1, keepdim=True))
        keep = torch.exp(peak - higher)
        weights = torch.exp(part - higher)
        total = total * keep + weights.sum(-1, keepdim=True)
        rounded = weights.to(weight_dtype).float()
        mixed = mixed * keep + torch.einsum("hk,khd->hd", rounded, value[begin : begin + tile])
        peak = higher
    return mixed / total


def rope_off_by_one(op: Any) -> Call:
    """Rotates by the angle of the next position."""
    honest = COMPOSITES["rope"](op)

    def rope(args: RopeArgs) -> Any:
        positions = (args.positions + 1).clamp(max=len(args.cos_sin) - 1)
        return honest(dataclasses.replace(args, positions=positions))

    return rope


def minus_one_to_slot_zero(op: Any) -> Call:
    """Writes tokens of slot -1 into slot 0."""
    honest = COMPOSITES["kv_write"](op)

    def kv_write(args: KvWriteArgs) -> None:
        group = dataclasses.replace(args.plan.group, slots=args.plan.slots.clamp(min=0))
        honest(dataclasses.replace(args, plan=dataclasses.replace(args.plan, group=group)))

    return kv_write


def linear_drops_tail(op: LinearOp) -> Call:
    """Sums over whole groups of 32 columns and forgets the rest."""
    honest = COMPOSITES["linear"](op)
    whole = op.in_features // 32 * 32

    def linear(args: LinearArgs) -> Tensor:
        if op.scheme != "none" or whole in (0, op.in_features) or not isinstance(args.x, Tensor):
            out: Tensor = honest(args)
            return out
        weight = args.weight.tensors()["weight"][:, :whole]
        packed = Packed(shape=weight.shape, scheme="none", tensors={"weight": weight})
        short: Tensor = honest(dataclasses.replace(args, x=args.x[:, :whole], weight=packed))
        return short

    return linear


def split_k_linear(parts: int) -> Maker:
    """Sums over `parts` runs of columns apart, then over the runs; honest."""

    def make(op: LinearOp) -> Call:
        honest: Call = COMPOSITES["linear"](op)
        if op.scheme != "none":
            return honest

        def linear(args: LinearArgs) -> Tensor:
            assert isinstance(args.x, Tensor)
            weight = args.weight.tensors()["weight"]
            pairs = zip(args.x.float().chunk(parts, dim=1), weight.float().chunk(parts, dim=1), strict=True)
            total = sum((a @ b.T for a, b in pairs), torch.zeros(len(args.x), len(weight)))
            if args.bias is not None:
                total = total + args.bias.float()
            return total.to(torch_dtype(op.out_dtype))

        return linear

    return make
