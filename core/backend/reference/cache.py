"""Reference of the paged cache: writing tokens into slots, and attention over a request's own blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend.batch import Plan
from core.backend.layout import torch_dtype
from core.backend.ops.cache import AttentionArgs, AttentionOp, KvWriteArgs, KvWriteOp
from core.backend.ops.spec import Determinism
from core.backend.reference.precision import saturate, wide
from core.backend.reference.registry import composite
from core.backend.schemes import raw, take

__all__ = ["Span", "owned_keys", "scatter_tokens", "softmax_mix", "spans", "split_for", "write_slots"]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one request lies: tokens [start, end) of the batch, seq_len keys.

    Args:
        index: Row of the block table.
        start: First token.
        end: Past its last token.
        seq_len: Keys, those of this step included.
    """

    index: int
    start: int
    end: int
    seq_len: int

    @property
    def first_position(self) -> int:
        """Position of its first query."""
        return self.seq_len - (self.end - self.start)


def spans(plan: Plan) -> Iterator[Span]:
    """Every request of the step that has tokens. Reads lengths from the device where the host's are mere bounds."""
    starts = plan.batch.query_start_loc_host
    lens = plan.group.seq_lens_host if plan.group.host_exact else plan.seq_lens.tolist()
    for index in range(plan.batch.num_reqs):
        if starts[index + 1] > starts[index]:
            yield Span(index, starts[index], starts[index + 1], lens[index])


def split_for(determinism: Determinism, span: Span) -> Iterator[Span]:
    """The span, or with D3 each of its queries alone with the keys up to it, so that chunks do not show."""
    if determinism < Determinism.D3:
        yield span
        return
    for token in range(span.start, span.end):
        yield Span(span.index, token, token + 1, span.first_position + token - span.start + 1)


@composite("kv_write")
def make_kv_write(op: KvWriteOp) -> Callable[[KvWriteArgs], None]:
    """Divides by the scales, rounds (8-bit types saturate), and stores."""

    def kv_write(args: KvWriteArgs) -> None:
        write_slots(args.cache[0], _stored(args.key, args.k_scale, op), args.plan.slots)
        if args.value is not None:
            write_slots(args.cache[1], _stored(args.value, args.v_scale, op), args.plan.slots)

    return kv_write


def _stored(x: Tensor, scale: Tensor | None, op: KvWriteOp) -> Tensor:
    if scale is None:
        return saturate(x, op.kv_dtype)
    return saturate(x.to(wide(op)) / scale.to(wide(op)).view(-1, 1), op.kv_dtype)


def write_slots(plane: Tensor, new: Tensor, slots: Tensor) -> None:
    """Stores new[t] into slot slots[t] of a plane [num_blocks, block_size, ...]; -1 is written nowhere.

    `new` is [len(slots), heads, dim] in the plane's dtype; rows past len(slots) are ignored.
    """
    flat = raw(plane).flatten(0, 1)
    scatter_tokens(flat, raw(new[: len(slots)]), slots)


def scatter_tokens(flat: Tensor, new: Tensor, slots: Tensor) -> None:
    """flat[slots[t]] = new[t] where slots[t] >= 0, without asking the device how many those are.

    A token without a slot repeats the write of the first token that has one, and where none has, writes back what is
    there: no slot gets two different values.
    """
    if not len(slots):
        return
    valid = slots >= 0
    rows = torch.arange(len(slots), device=slots.device)
    source = torch.where(valid, rows, valid.int().argmax())
    target = slots.index_select(0, source).long().clamp(min=0)
    keep = valid.index_select(0, source).view(-1, *[1] * (flat.dim() - 1))
    flat.index_copy_(0, target, torch.where(keep, new.index_select(0, source), flat.index_select(0, target)))


@composite("attention")
def make_attention(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    """Request by request over its own blocks; query by query where chunks must not show (D3)."""

    def attention(args: AttentionArgs) -> Tensor:
        shape = (*args.query.shape[:2], op.v_head_dim)
        out = args.query.new_zeros(shape, dtype=torch_dtype(op.dtype))
        if args.lse is not None:
            args.lse.fill_(-torch.inf)
        for span in spans(args.plan):
            for part in split_for(op.determinism, span) if op.causal else (span,):
                mixed, lse = _attend(op, args, part)
                out[part.start : part.end] = mixed.to(out.dtype)
                if args.lse is not None:
                    args.lse[part.start : part.end] = lse.to(args.lse.dtype)
        return out

    return attention


def _attend(op: AttentionOp, args: AttentionArgs, span: Span) -> tuple[Tensor, Tensor]:
    """Output [n, num_heads, v_head_dim] and log-sum-exp [n, num_heads] of the request's n queries."""
    acc = wide(op)
    windowed = op.causal and op.window > 0
    first_key = max(0, span.first_position - op.window + 1) if windowed else 0
    key, value, owned = _keys_values(op, args, span, first_key)
    query = args.query[span.start : span.end].to(acc)
    positions = torch.arange(span.first_position, span.seq_len, device=query.device)[:, None]
    keys_at = torch.arange(first_key, span.seq_len, device=query.device)
    seen = owned.expand(len(positions), -1)
    if op.causal:
        seen = seen & (keys_at <= positions)
    if windowed:
        seen = seen & (keys_at > positions - op.window)
    logits = _logits(op, query, key)
    sinks = None if args.sinks is None else args.sinks.to(acc)
    return softmax_mix(logits, seen, value, sinks)


def _logits(op: AttentionOp, query: Tensor, key: Tensor) -> Tensor:
    """[num_heads, n, num_keys]: scaled and capped products."""
    grouped = query.transpose(0, 1).reshape(op.num_kv_heads, -1, op.head_dim)
    logits = torch.bmm(grouped, key.permute(1, 2, 0)) * op.scale
    logits = logits.view(op.num_heads, len(query), len(key))
    return op.softcap * torch.tanh(logits / op.softcap) if op.softcap > 0 else logits


def softmax_mix(logits: Tensor, seen: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over the keys that are seen, and the values weighted by it. A query that sees none gets zeros and -inf.

    Args:
        logits: [heads, n, keys].
        seen: [n, keys], bool.
        value: [keys, value heads, dim]; each serves an equal run of heads.
        sinks: [heads]: logits that join the denominator alone.

    Returns:
        ([n, heads, dim], log-sum-exp [n, heads]).
    """
    logits = torch.where(seen, logits, -torch.inf)
    peak = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((*logits.shape[:2], 1), -torch.inf)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.view(-1, 1, 1))
    finite_peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = torch.exp(logits - finite_peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(-1, 1, 1) - finite_peak)
    heads, queries, keys = weights.shape
    mixed = torch.bmm(weights.reshape(value.shape[1], -1, keys), value.transpose(0, 1)).view(heads, queries, -1)
    mixed = mixed / torch.where(total == 0, 1.0, total)
    return mixed.transpose(0, 1), (finite_peak + torch.log(total)).squeeze(-1).transpose(0, 1)


def _keys_values(op: AttentionOp, args: AttentionArgs, span: Span, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of positions [first, seq_len), in the wide type, and which of them the request owns."""
    if args.cache is None:
        assert args.key is not None and args.value is not None, "ragged attention needs key and value"
        begin = span.end - span.seq_len  # of the request, also where the span is one of its queries alone
        key, value = (x[begin + first : span.end].to(wide(op)) for x in (args.key, args.value))
        return key, value, torch.ones(len(key), dtype=torch.bool, device=key.device)
    key, owned = owned_keys(args.cache[0], args.plan, span, first)
    value, _ = owned_keys(args.cache[1], args.plan, span, first)
    return _scaled(key.to(wide(op)), args.k_scale), _scaled(value.to(wide(op)), args.v_scale), owned


def owned_keys(plane: Tensor, plan: Plan, span: Span, first: int = 0) -> tuple[Tensor, Tensor]:
    """What a request keeps in a plane at positions [first, seq_len), gathered through its block table.

    Returns:
        (rows [n, ...] in the plane's dtype, zeros where the null block stands; whether it is a real block [n], bool).
    """
    size = plan.block_size
    begin = first // size
    blocks = plan.block_table[span.index, begin : -(-span.seq_len // size)]
    used = slice(first - begin * size, span.seq_len - begin * size)
    owned = (blocks != 0).repeat_interleave(size)[used]
    rows = raw(take(plane, blocks).flatten(0, 1)[used])
    rows = torch.where(owned.view(-1, *[1] * (rows.dim() - 1)), rows, torch.zeros_like(rows))
    return rows.view(plane.dtype), owned


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale.to(x.dtype).view(-1, 1)
