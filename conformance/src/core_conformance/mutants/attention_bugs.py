"""Attention with one bug each, and the joining of parts of it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, Determinism, MergeLseArgs
from core.backend.reference.cache import owned_keys, spans
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.plain_attention import Form, plain_attention
from core_conformance.mutants.planting import after, before, changed_op
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS", "blocks_by_number", "padding_untouched"]


def _sees(shift: int) -> Maker:
    """Each query sees `shift` keys more (or, negative, fewer) than it should."""

    def make(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
        honest = oracle(op)

        def attention(args: AttentionArgs) -> Tensor:
            out: Tensor = honest(args)
            if args.cache is None or not op.causal or op.features:
                return out
            for span in spans(args.plan):
                for token in range(span.start, span.end):
                    seen = span.first_position + token - span.start + 1
                    shifted = min(max(seen + shift, 1), span.seq_len)
                    if shifted != seen:
                        first = max(0, seen - op.window) if op.window else 0
                        out[token] = _attend(op, args, dataclasses.replace(span, seq_len=shifted), token, first)
            return out

        return attention

    return make


def _attend(op: AttentionOp, args: AttentionArgs, span: Any, token: int, first: int) -> Tensor:
    """[num_heads, v_head_dim] of one query over the keys [first, span.seq_len)."""
    assert args.cache is not None
    (key, owned), (value, _) = (owned_keys(plane, args.plan, span, first) for plane in args.cache)
    if not owned.any():
        return args.query.new_zeros(op.num_heads, op.v_head_dim)
    repeat = op.num_heads // op.num_kv_heads
    key, value = (x[owned].float().repeat_interleave(repeat, dim=1) for x in (key, value))
    logits = torch.einsum("hd,khd->hk", args.query[token].float(), key) * op.scale
    if op.softcap:
        logits = op.softcap * torch.tanh(logits / op.softcap)
    return torch.einsum("hk,khd->hd", logits.softmax(-1), value).to(args.query.dtype)


def _head_map_transposed(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    """Query head h reads key head h % num_kv_heads."""
    honest = oracle(op)
    order = torch.arange(op.num_heads).view(-1, op.num_kv_heads).T.flatten()

    def attention(args: AttentionArgs) -> Tensor:
        out = honest(dataclasses.replace(args, query=args.query[:, order]))
        back = torch.empty_like(out)
        back[:, order] = out
        return back

    return attention


def _first_key_head_for_all(op: AttentionOp, args: AttentionArgs) -> AttentionArgs:
    if args.cache is None:
        return args
    key, value = args.cache
    return dataclasses.replace(args, cache=(key[:, :, :1].expand_as(key), value))


def _with_group(args: Any, **changes: Any) -> Any:
    """The same record with another group in its plan."""
    plan = dataclasses.replace(args.plan, group=dataclasses.replace(args.plan.group, **changes))
    return dataclasses.replace(args, plan=plan)


def blocks_by_number(op: Any, args: Any) -> Any:
    """Blocks are read in rising order of their ids."""
    table = args.plan.block_table.clone()
    for row in table:
        real = row != 0
        row[real] = row[real].sort().values
    return _with_group(args, block_table=table)


def _rows_of_requests_with_tokens(op: AttentionOp, args: AttentionArgs) -> AttentionArgs:
    """A request without tokens in the step shifts the block tables of those behind it."""
    starts = torch.tensor(args.plan.batch.query_start_loc_host)
    rank = ((starts.diff() > 0).cumsum(0) - 1).clamp(min=0)
    return _with_group(args, block_table=args.plan.block_table[rank])  # type: ignore[no-any-return]


def _blocks_of_sixteen(op: AttentionOp, args: AttentionArgs) -> AttentionArgs:
    """Addresses are made for blocks of 16 tokens, whatever the block size."""
    if args.cache is None or args.plan.block_size == 16:
        return args
    slots = len(args.cache[0]) * args.plan.block_size // 16 * 16
    cache = tuple(plane.flatten(0, 1)[:slots].unflatten(0, (-1, 16)) for plane in args.cache)
    table = args.plan.block_table.clamp(max=len(cache[0]) - 1)
    missing = -(-max(args.plan.group.seq_lens_host) // 16) - table.shape[1]
    if missing > 0:
        table = torch.cat((table, table[:, -1:].expand(-1, missing)), dim=1)
    args = dataclasses.replace(args, cache=cache, plan=dataclasses.replace(args.plan, block_size=16))
    return _with_group(args, block_table=table)  # type: ignore[no-any-return]


def _first_128_elements(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    """Of larger heads only 128 elements are multiplied."""
    if op.head_dim <= 128 or op.has("ragged"):
        return oracle(op)
    short = oracle(dataclasses.replace(op, head_dim=128))

    def attention(args: AttentionArgs) -> Tensor:
        assert args.cache is not None
        key, value = args.cache
        out: Tensor = short(dataclasses.replace(args, query=args.query[..., :128], cache=(key[..., :128], value)))
        return out

    return attention


def _fresh_key_counted_twice(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    """A token's own key counts from the cache and once more from the hint."""
    honest, with_lse = oracle(op), oracle(dataclasses.replace(op, features=op.features | {"lse"}))

    def attention(args: AttentionArgs) -> Tensor:
        if args.cache is None or args.key is None or args.value is None or op.features:
            plain: Tensor = honest(args)
            return plain
        lse = args.query.new_zeros(args.query.shape[:2], dtype=torch.float32)
        out = with_lse(dataclasses.replace(args, lse=lse))
        repeat = op.num_heads // op.num_kv_heads
        key, value = (x.float().repeat_interleave(repeat, dim=1) for x in (args.key, args.value))
        share = torch.sigmoid((args.query.float() * key).sum(-1) * op.scale - lse)[..., None]
        mixed: Tensor = ((1 - share) * out.float() + share * value).to(torch_dtype(op.dtype))
        return mixed

    return attention


def padding_untouched(op: Any, args: Any, out: Tensor) -> Tensor:
    """Rows of padding keep what the memory held."""
    out[int(args.plan.batch.num_valid_tokens) :] = float("nan")
    return out


def _query_without_stride(op: AttentionOp, args: AttentionArgs) -> AttentionArgs:
    """Rows of the query are read as if nothing lay between them."""
    query, (_, heads, dim) = args.query, args.query.shape
    if query.is_contiguous():
        return args
    dense = torch.as_strided(query, query.shape, (heads * dim, dim, 1), query.storage_offset())
    return dataclasses.replace(args, query=dense)


def _values_as_wide_as_keys(op: AttentionOp, args: AttentionArgs) -> AttentionArgs:
    """Rows of values are found by the width of keys."""
    if args.cache is None or op.v_head_dim == op.head_dim:
        return args
    value = args.cache[1]
    row = torch.arange(value.numel() // op.v_head_dim)[:, None] * op.head_dim + torch.arange(op.v_head_dim)
    wrong = value.flatten()[row % value.numel()].view(value.shape)
    return dataclasses.replace(args, cache=(args.cache[0], wrong))


def _query_scaled_in_place(op: AttentionOp, args: AttentionArgs, out: Tensor) -> Tensor:
    args.query.mul_(op.scale)
    return out


def _lse_in_base_2(op: AttentionOp, args: AttentionArgs, out: Tensor) -> Tensor:
    if args.lse is not None:
        args.lse.div_(math.log(2.0))
    return out


def _lse_without_scale(op: AttentionOp, args: AttentionArgs, out: Tensor) -> Tensor:
    if args.lse is not None and op.scale:
        args.lse.div_(op.scale)
    return out


def _equal_parts(op: Any, args: MergeLseArgs, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Parts count alike, whatever their weight."""
    there = (args.lses > -math.inf)[..., None]
    mean = torch.where(there, args.outs.float(), 0.0).sum(0) / there.sum(0).clamp(min=1)
    return mean.to(out[0].dtype), out[1]


def _merge_in_base_2(op: Any, args: MergeLseArgs) -> MergeLseArgs:
    return dataclasses.replace(args, lses=args.lses * math.log(2.0))


def _empty_part_poisons(op: Any, args: MergeLseArgs, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """-inf minus -inf where no part saw a key."""
    nowhere = (args.lses == -math.inf).all(0)
    return out[0].masked_fill(nowhere[..., None], math.nan), out[1]


_calls = itertools.count()


def _attention(name: str, maker: Maker, first: str = "attention") -> Mutant:
    return kernel_bug(name, first, {"attention": maker})


MUTANTS: tuple[Mutant, ...] = (
    _attention("softmax scale 1.01", changed_op(scale=lambda op: op.scale * 1.01)),
    _attention("last key skipped", _sees(-1)),
    _attention("one extra key", _sees(1)),
    _attention("head map transposed", _head_map_transposed, "attention/head-map"),
    _attention("every query head reads the first key head", before(_first_key_head_for_all), "attention/key-heads"),
    _attention("window off by one", changed_op(window=lambda op: op.window + 1 if op.window else 0)),
    _attention("window in whole blocks", changed_op(window=lambda op: -(-op.window // 16) * 16), "attention/window"),
    _attention("cap taken before the scale", changed_op(softcap=lambda op: op.softcap * op.scale), "attention/softcap"),
    _attention("always causal", changed_op(causal=lambda op: True), "attention/bidirectional"),
    _attention("ragged mode sees the future", changed_op(causal=lambda op: not op.has("ragged")), "attention/ragged"),
    _attention("sinks left out", before(lambda op, args: dataclasses.replace(args, sinks=None)), "attention/sinks"),
    _attention("lse in base 2", after(_lse_in_base_2), "attention/lse"),
    _attention("lse of logits without the scale", after(_lse_without_scale), "attention/lse"),
    _attention("softmax without its maximum", plain_attention(Form(subtract_peak=False)), "attention/large-logits"),
    _attention("weight 0 times whatever lies there", plain_attention(Form(blank_unseen=False)), "attention/window"),
    _attention("logits in half precision", plain_attention(Form(half_logits=True))),
    _attention("blocks read in order of their ids", before(blocks_by_number), "attention/permuted"),
    _attention("request without tokens shifts the tables", before(_rows_of_requests_with_tokens), "attention/mixed"),
    _attention("blocks of 16 tokens assumed", before(_blocks_of_sixteen), "attention/every-block-size"),
    _attention("128 elements of a head", _first_128_elements, "attention/head-dim-256"),
    _attention("fresh key counted twice", _fresh_key_counted_twice, "attention/hints"),
    _attention("padding rows left as they were", after(padding_untouched), "attention/padding"),
    _attention("query read without its stride", before(_query_without_stride), "attention/strided"),
    _attention("values found by the width of keys", before(_values_as_wide_as_keys), "attention/value-dim"),
    _attention("query overwritten", after(_query_scaled_in_place)),
    kernel_bug("merged parts count alike", "merge_lse", {"merge_lse": after(_equal_parts)}),
    kernel_bug("merged in base 2", "merge_lse", {"merge_lse": before(_merge_in_base_2)}),
    kernel_bug("NaN where no part has a key", "merge_lse", {"merge_lse": after(_empty_part_poisons)}),
    Mutant(
        name="D3 declared, split by the number of requests",
        level="L3",
        first="L3/bitwise/batch",
        makers={"attention": plain_attention(Form(tile=lambda args: 3 + args.plan.batch.num_reqs))},
        determinism=Determinism.D3,
    ),
    Mutant(
        name="D3 declared, split by the query's length",
        level="L3",
        first="L3/bitwise/chunks",
        makers={"attention": plain_attention(Form(tile=lambda args: 3 + args.plan.batch.max_query_len % 5))},
        determinism=Determinism.D3,
    ),
    Mutant(
        name="D3 declared, split anew at each call",
        level="L3",
        first="L3/bitwise",
        makers={"attention": plain_attention(Form(tile=lambda args: 3 + next(_calls) % 7))},
        determinism=Determinism.D3,
    ),
)
