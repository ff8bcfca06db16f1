"""Numerics of the attention calls and of the cache writes, with the bounds that their texts name."""

from __future__ import annotations

import torch
from torch import Tensor

from core_ascend.limits import (
    HEAD_MULTIPLE,
    MASK_SIZE,
    MAX_HEAD_DIM,
    MAX_HEAD_RATIO,
    MAX_INNER,
    MAX_LATENT_HEADS,
    MAX_LISTED,
    MAX_PIECE,
    MAX_SINK_DIM,
    PAGE,
)
from core_ascend.simulation import chip_types
from core_ascend.simulation.calls import numerics
from core_ascend.simulation.faults import need, need_contiguous, need_lists, need_types

__all__ = ["attend", "gathered"]

_ENDLESS = 2147483647


def gathered(plane: Tensor, table: Tensor, request: int, count: int, call: str) -> Tensor:
    """[count, ...]: the first `count` tokens of a request out of a plane [blocks, block_size, ...]."""
    size = plane.shape[1]
    blocks = table[request, : -(-count // size)].long()
    need(bool(((blocks >= 0) & (blocks < len(plane))).all()), f"{call}: a block table names a block that is not there")
    return plane[blocks].flatten(0, 1)[:count]


def attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """([n, heads, dim], log-sum-exp [n, heads]) in float32 of queries [n, heads, dim], keys [m, key heads, dim]."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(repeat, dim=1) for x in (key, value))
    logits = torch.einsum("nhd,mhd->hnm", query.float(), key) * scale
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.float()[:, None].expand_as(lse))
    weights = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    used = torch.ones(len(key), dtype=torch.bool) if seen is None else seen.any(0)
    value = torch.where(used[:, None, None], value, 0.0)  # what no query sees may be anything
    return torch.einsum("hnm,mhd->nhd", weights, value), lse.T


def _check_mask(call: str, mask: Tensor | None, mode: int) -> None:
    need(mode in (0, 3, 4), f"{call}: sparse_mode {mode} is not taken with packed queries")
    if mode == 0:
        need(mask is None, f"{call}: sparse_mode 0 takes no mask with packed queries")
        return
    need(mask is not None, f"{call}: sparse_mode {mode} needs the mask")
    assert mask is not None
    need(mask.dtype in (torch.int8, torch.uint8, torch.bool), f"{call}: the mask is {mask.dtype}")
    need(tuple(mask.shape) == (MASK_SIZE, MASK_SIZE), f"{call}: the mask is {tuple(mask.shape)}, not 2048 x 2048")
    corner = mask[:64, :64].int()
    need(bool((corner == torch.ones(64, 64).triu(1)).all()), f"{call}: the mask is not 1 above the diagonal alone")


def _band(queries: int, keys: int, mode: int, before: int, after: int) -> Tensor | None:
    """[queries, keys]: what a query sees, the last one standing at the last key."""
    if mode == 0:
        return None
    at = torch.arange(keys - queries, keys)[:, None]
    keys_at = torch.arange(keys)[None]
    if mode == 3:
        return keys_at <= at
    return (keys_at >= at - before) & (keys_at <= at + after)


def _packed(
    call: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ends: list[int] | None,
    lens: list[int] | None,
    mask: Tensor | None,
    table: Tensor | None,
    block_size: int,
    heads: int,
    kv_heads: int,
    scale: float,
    mode: int,
    before: int,
    after: int,
    layout: str,
    rope: tuple[Tensor, Tensor] | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    need(layout == "TND", f"{call}: layout {layout} is not simulated")
    need_types(call, chip_types.halves, query=query, key=key, value=value)
    need_contiguous(call, query=query, key=key, value=value, block_table=table)
    need(query.dim() == 3 and query.shape[1] == heads, f"{call}: query {tuple(query.shape)} has not {heads} heads")
    kv_heads = kv_heads or heads
    need(heads % kv_heads == 0 and heads // kv_heads <= MAX_HEAD_RATIO, f"{call}: {heads} heads over {kv_heads}")
    ends, lens = need_lists(call, ends, lens, len(query))
    need(len(ends) <= MAX_LISTED, f"{call}: {len(ends)} requests, at most {MAX_LISTED}")
    _check_mask(call, mask, mode)
    width = query.shape[2]
    if rope is None:
        need(width % HEAD_MULTIPLE == 0 and width <= MAX_HEAD_DIM, f"{call}: heads of {width}")
    else:
        _check_latent(call, query, key, value, rope, kv_heads, table)
    if sink is not None:
        need(sink.dtype is torch.bfloat16 and tuple(sink.shape) == (heads,), f"{call}: sinks are bfloat16, one a head")
        need(width <= MAX_SINK_DIM, f"{call}: sinks take heads of at most {MAX_SINK_DIM}")
    if table is not None:
        _check_pages(call, key, value, table, block_size, ends, lens)
    else:
        need(
            lens[-1] == len(key) == len(value),
            f"{call}: key lengths without pages are cumulative, the last one {len(key)}",
        )
    out = torch.empty(len(query), heads, value.shape[-1] if rope else width, dtype=query.dtype)
    lse = torch.empty(len(query), heads, 1, dtype=torch.float32)
    start = first_key = 0
    for request, (end, length) in enumerate(zip(ends, lens, strict=True)):
        count = end - start
        if table is None:
            keys, values = key[first_key:length], value[first_key:length]
            first_key, length = length, length - first_key
        else:
            keys, values = (gathered(x, table, request, length, call) for x in (key, value))
        if count:
            need(mode == 0 or length >= count, f"{call}: request {request} has {count} queries and {length} keys")
            keys, values = (x.reshape(length, kv_heads, -1) for x in (keys, values))
            queries = query[start:end]
            if rope is not None:
                need(
                    count <= MAX_PIECE, f"{call}: {count} queries of a request, at most {MAX_PIECE} of latent attention"
                )
                assert table is not None
                turned = gathered(rope[1], table, request, length, call).reshape(length, 1, -1)
                queries, keys = torch.cat((queries, rope[0][start:end]), -1), torch.cat((keys, turned), -1)
            mixed, total = attend(queries, keys, values, scale, _band(count, length, mode, before, after), sink)
            out[start:end], lse[start:end] = mixed.to(out.dtype), total[..., None]
        start = end
    return out, lse


def _check_latent(
    call: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rope: tuple[Tensor, Tensor],
    kv_heads: int,
    table: Tensor | None,
) -> None:
    need(query.shape[2] == 512 and kv_heads == 1, f"{call}: latent queries are 512 wide over one key head")
    heads = query.shape[1]
    need(heads & (heads - 1) == 0 and heads <= MAX_LATENT_HEADS, f"{call}: {heads} heads are no power of two up to 128")
    need(rope[0].shape == (*query.shape[:2], 64), f"{call}: query_rope is {tuple(rope[0].shape)}")
    need(table is not None, f"{call}: latent attention is paged")
    need(key.dim() == 4 and key.shape[-1] == 512 and rope[1].shape[-1] == 64, f"{call}: planes are 512 and 64 wide")
    need(key.data_ptr() == value.data_ptr(), f"{call}: key and value are one plane")
    need_types(call, chip_types.halves, query=query, query_rope=rope[0], key_rope=rope[1])
    need_contiguous(call, query_rope=rope[0], key_rope=rope[1])


def _check_pages(
    call: str, key: Tensor, value: Tensor, table: Tensor, block_size: int, ends: list[int], lens: list[int]
) -> None:
    need(
        block_size % PAGE == 0 and block_size <= 512,
        f"{call}: block size {block_size} is no multiple of {PAGE} up to 512",
    )
    need(
        key.shape[1] == block_size == value.shape[1],
        f"{call}: planes of {key.shape[1]} tokens, block_size {block_size}",
    )
    need(
        key.dim() in (3, 4) and key[0, 0].numel() <= MAX_INNER, f"{call}: planes are [blocks, block_size, heads * dim]"
    )
    need(table.dtype is torch.int32 and table.dim() == 2, f"{call}: the block table is int32, [requests, blocks]")
    need(len(table) == len(ends), f"{call}: {len(ends)} requests, {len(table)} rows in the block table")
    need(table.shape[1] * block_size >= max(lens), f"{call}: the block table is too narrow for {max(lens)} keys")


@numerics("npu::npu_fused_infer_attention_score")
def _fused(query, key, value, *, atten_mask=None, actual_seq_lengths=None, actual_seq_lengths_kv=None,  # type: ignore[no-untyped-def]
           block_table=None, num_heads=1, scale=1.0, pre_tokens=_ENDLESS, next_tokens=_ENDLESS, input_layout="BSH",
           num_key_value_heads=0, sparse_mode=0, block_size=0, softmax_lse_flag=False):  # fmt: skip
    out, lse = _packed(
        "npu_fused_infer_attention_score", query, key, value, ends=actual_seq_lengths, lens=actual_seq_lengths_kv,
        mask=atten_mask, table=block_table, block_size=block_size, heads=num_heads, kv_heads=num_key_value_heads,
        scale=scale, mode=sparse_mode, before=pre_tokens, after=next_tokens, layout=input_layout,
    )  # fmt: skip
    return out, lse if softmax_lse_flag else torch.zeros(0)


@numerics("npu::npu_fused_infer_attention_score_v2")
def _fused_v2(query, key, value, *, query_rope=None, key_rope=None, atten_mask=None, actual_seq_qlen=None,  # type: ignore[no-untyped-def]
              actual_seq_kvlen=None, block_table=None, learnable_sink=None, num_query_heads=1, num_key_value_heads=0,
              softmax_scale=1.0, pre_tokens=_ENDLESS, next_tokens=_ENDLESS, input_layout="BSH", sparse_mode=0,
              block_size=0, return_softmax_lse=False):  # fmt: skip
    call = "npu_fused_infer_attention_score_v2"
    need((query_rope is None) == (key_rope is None), f"{call}: query_rope and key_rope come together")
    rope = None if query_rope is None else (query_rope, key_rope)
    if rope is not None:
        starts = [0, *(actual_seq_qlen or [])[:-1]]
        several = any(b - a > 1 for a, b in zip(starts, actual_seq_qlen or [], strict=True))
        need(sparse_mode == (3 if several else 0), f"{call}: one query a request takes sparse_mode 0, several take 3")
    out, lse = _packed(
        call, query, key, value, ends=actual_seq_qlen, lens=actual_seq_kvlen, mask=atten_mask, table=block_table,
        block_size=block_size, heads=num_query_heads, kv_heads=num_key_value_heads, scale=softmax_scale,
        mode=sparse_mode, before=pre_tokens, after=next_tokens, layout=input_layout, rope=rope, sink=learnable_sink,
    )  # fmt: skip
    return out, lse if return_softmax_lse else torch.zeros(0)


@numerics("npu::npu_scatter_pa_kv_cache")
def _scatter(key, value, key_cache, value_cache, slot_mapping, *, cache_mode="PA_NZ"):  # type: ignore[no-untyped-def]
    call = "npu_scatter_pa_kv_cache"
    need(cache_mode == "Norm", f"{call}: cache_mode {cache_mode} is not simulated")
    need_contiguous(call, key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping)
    need(len({x.dtype for x in (key, value, key_cache, value_cache)}) == 1, f"{call}: element types differ")
    need(key.dim() == value.dim() == 3 and key_cache.dim() == value_cache.dim() == 4, f"{call}: tokens 3-D, planes 4-D")
    need(key.shape[:2] == value.shape[:2], f"{call}: key and value differ in tokens or heads")
    for name, x, plane in (("key", key, key_cache), ("value", value, value_cache)):
        need(
            x.shape[1:] == plane.shape[2:], f"{call}: {name} {tuple(x.shape)} does not fit planes {tuple(plane.shape)}"
        )
    need(slot_mapping.dtype in (torch.int32, torch.int64), f"{call}: slots are {slot_mapping.dtype}")
    need(slot_mapping.shape == (len(key),), f"{call}: one slot a token")
    room = key_cache.shape[0] * key_cache.shape[1]
    slots = slot_mapping.long()
    need(bool(((slots >= 0) & (slots < room)).all()), f"{call}: a slot is outside of [0, {room})")
    for x, plane in ((key, key_cache), (value, value_cache)):
        flat = plane.view(room, *plane.shape[2:])
        flat[slots] = x
        bits = torch.int16 if x.element_size() == 2 else torch.int32
        written = flat[slots].contiguous().view(bits)
        need(torch.equal(written, x.view(bits)), f"{call}: one slot got two different tokens")


@numerics("atb::_npu_reshape_and_cache")
def _reshape_and_cache(key, value, key_cache, value_cache, slot_indices):  # type: ignore[no-untyped-def]
    call = "_npu_reshape_and_cache"
    need_types(call, chip_types.halves, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    need_contiguous(call, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    need(
        slot_indices.dtype is torch.int32 and slot_indices.shape == (len(key),), f"{call}: slots are int32, one a token"
    )
    need(key_cache.dim() == 4 and key_cache.shape[-1] == 16, f"{call}: planes are [blocks, heads * dim / 16, size, 16]")
    need(key[0].numel() == key_cache.shape[1] * 16, f"{call}: key does not fit planes {tuple(key_cache.shape)}")
    size, slots = key_cache.shape[2], slot_indices.long()
    need(bool(((slots >= 0) & (slots < len(key_cache) * size)).all()), f"{call}: a slot is outside of the cache")
    for x, plane in ((key, key_cache), (value, value_cache)):
        plane[slots // size, :, slots % size] = x.reshape(len(x), -1, 16)


@numerics("atb::_npu_paged_attention_splitfuse")
def _split_fused(query, key_cache, value_cache, block_table, context_lens, mask, seq_len, num_kv_heads, num_heads,  # type: ignore[no-untyped-def]
                 scale_value, out):  # fmt: skip
    call = "_npu_paged_attention_splitfuse"
    need_types(call, chip_types.halves, query=query, key_cache=key_cache, value_cache=value_cache, mask=mask, out=out)
    need_contiguous(call, query=query, key_cache=key_cache, value_cache=value_cache, mask=mask, block_table=block_table)
    for name, x in (("seq_len", seq_len), ("context_lens", context_lens), ("block_table", block_table)):
        need(x.dtype is torch.int32, f"{call}: {name} is {x.dtype}, not int32")
    counts, lens = seq_len.tolist(), context_lens.tolist()
    need(sum(counts) == len(query) and len(counts) == len(lens) == len(block_table), f"{call}: lengths do not fit")
    size = key_cache.shape[2]
    need(size in (64, 128) and size * query.shape[2] <= 128 * 128, f"{call}: blocks of {size} x {query.shape[2]}")
    need(chip_types.is_fractal(mask) and mask.dim() == 4 and mask.shape[-1] == 16, f"{call}: the mask is in fractals")
    rows = mask[0].transpose(0, 1).flatten(1)
    start = 0
    for request, (count, length) in enumerate(zip(counts, lens, strict=True)):
        if count:
            planes = (plane.transpose(1, 2) for plane in (key_cache, value_cache))
            keys, values = (
                gathered(plane, block_table, request, length, call).reshape(length, num_kv_heads, -1)
                for plane in planes
            )
            seen = rows[start : start + count, :length] == 0
            need(bool(seen.any(-1).all()), f"{call}: the mask hides every key of a query")
            mixed, _ = attend(query[start : start + count], keys, values, scale_value, seen)
            out[start : start + count] = mixed.to(out.dtype)
        start += count
