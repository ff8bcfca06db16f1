"""Numerics of the index call and of sparse latent attention."""

from __future__ import annotations

import torch
from torch import Tensor

from core_ascend.limits import INDEX_COUNTS, INDEX_DIM, MAX_INDEX_HEADS
from core_ascend.simulation import chip_types
from core_ascend.simulation.attention import attend, gathered
from core_ascend.simulation.calls import numerics
from core_ascend.simulation.faults import need, need_contiguous, need_lists, need_types

__all__: list[str] = []


def _lengths(call: str, ends: Tensor, lens: Tensor, tokens: int) -> tuple[list[int], list[int]]:
    for name, x in (("query", ends), ("key", lens)):
        need(x is not None and x.dtype is torch.int32, f"{call}: lengths of the {name} are int32 on the device")
    return need_lists(call, ends.tolist(), lens.tolist(), tokens)


@numerics("npu::npu_lightning_indexer")
def _indexer(query, key, weights, *, actual_seq_lengths_query=None, actual_seq_lengths_key=None, block_table=None,  # type: ignore[no-untyped-def]
             layout_query="BSND", layout_key="BSND", sparse_count=2048, sparse_mode=3):  # fmt: skip
    call = "npu_lightning_indexer"
    need((layout_query, layout_key, sparse_mode) == ("TND", "PA_BSND", 3), f"{call}: layouts are not simulated")
    need_types(call, chip_types.halves, query=query, key=key, weights=weights)
    need_contiguous(call, query=query, key=key, weights=weights, block_table=block_table)
    need(query.shape[2] == INDEX_DIM and query.shape[1] <= MAX_INDEX_HEADS, f"{call}: query {tuple(query.shape)}")
    need(1 <= sparse_count <= 2048 or sparse_count in INDEX_COUNTS, f"{call}: {sparse_count} positions")
    need(block_table.dtype is torch.int32, f"{call}: the block table is {block_table.dtype}")
    ends, lens = _lengths(call, actual_seq_lengths_query, actual_seq_lengths_key, len(query))
    out = torch.full((len(query), 1, sparse_count), -1, dtype=torch.int32)
    start = 0
    for request, (end, length) in enumerate(zip(ends, lens, strict=True)):
        keys = gathered(key, block_table, request, length, call)[:, 0].float()
        for token in range(start, end):
            seen = length - (end - token) + 1
            scores = (torch.relu(query[token].float() @ keys[:seen].T) * weights[token].float()[:, None]).sum(0)
            best = scores.sort(descending=True, stable=True).indices[:sparse_count]
            out[token, 0, : len(best)] = best.to(torch.int32)
        start = end
    return out, torch.empty(0, dtype=query.dtype)


@numerics("npu::npu_sparse_flash_attention")
def _sparse(query, key, value, sparse_indices, scale_value, *, block_table=None, actual_seq_lengths_query=None,  # type: ignore[no-untyped-def]
            actual_seq_lengths_kv=None, query_rope=None, key_rope=None, sparse_block_size=1, layout_query="BSND",
            layout_kv="BSND", sparse_mode=3, attention_mode=0, return_softmax_lse=False):  # fmt: skip
    call = "npu_sparse_flash_attention"
    need((layout_query, layout_kv, sparse_mode) == ("TND", "PA_BSND", 3), f"{call}: layouts are not simulated")
    need(sparse_block_size == 1 and attention_mode == 2, f"{call}: latent attention over single tokens")
    need_types(call, chip_types.halves, query=query, key=key, query_rope=query_rope, key_rope=key_rope)
    need_contiguous(call, query=query, key=key, query_rope=query_rope, key_rope=key_rope, sparse_indices=sparse_indices)
    need(query.shape[2] == 512 and query_rope.shape[2] == 64, f"{call}: 512 beside 64")
    need(sparse_indices.dtype is torch.int32 and sparse_indices.dim() == 3, f"{call}: indices are int32, [T, 1, k]")
    behind = (sparse_indices[..., :-1] < 0) & (sparse_indices[..., 1:] >= 0)
    need(not bool(behind.any()), f"{call}: valid indices come before the others")
    ends, lens = _lengths(call, actual_seq_lengths_query, actual_seq_lengths_kv, len(query))
    out = torch.empty_like(query)
    start = 0
    for request, (end, length) in enumerate(zip(ends, lens, strict=True)):
        rows = torch.cat([gathered(x, block_table, request, length, call) for x in (key, key_rope)], -1)
        for token in range(start, end):
            chosen = sparse_indices[token, 0].long()
            chosen = chosen[(chosen >= 0) & (chosen <= length - (end - token))]
            queries = torch.cat((query[token], query_rope[token]), -1)[None]
            mixed, _ = attend(queries, rows[chosen], rows[chosen][..., :512], scale_value, None)
            out[token] = mixed[0].to(out.dtype) if len(chosen) else 0.0
        start = end
    return out, torch.empty(0), torch.empty(0)
