"""Attention over the paged cache, and over keys and values that are in none."""

from __future__ import annotations

import torch
from torch import Tensor

from core_cpu import _kernels
from core_cpu.kernels.arguments import DTYPE_CODES, float32_address, head_parts, int32_address, require
from core_cpu.kernels.cache import KvPlanes
from core_cpu.tape_memory import empty

__all__ = ["AttentionKernel", "attention", "attention_ragged"]


class AttentionKernel:
    """Attention with its static parameters. See `attention` and `attention_ragged` for the calls.

    Args:
        num_heads: Query heads.
        dtype: Type of query and output.
        scale: Factor of the logits.
        causal: Whether a query sees only keys up to its own position.
        window: Keys that a query sees, its own included; 0 sees all. Ignored where not causal.
        softcap: Logits become softcap * tanh(logits / softcap); 0 leaves them.
        split_keys: 0 splits long streams by what the threads need; positive splits always at multiples of it;
            negative never splits. Only with 0 may a row's bits depend on the batch and the number of threads.
        int16: Whether queries, keys, probabilities and values may be rounded to 16-bit integers, where
            `rounds_attention` says so and all are bfloat16.
    """

    __slots__ = ("dtype", "handle", "num_heads")

    def __init__(
        self,
        num_heads: int,
        dtype: torch.dtype,
        scale: float,
        *,
        causal: bool = True,
        window: int = 0,
        softcap: float = 0.0,
        split_keys: int = 0,
        int16: bool = False,
    ) -> None:
        code = DTYPE_CODES[dtype]
        self.num_heads, self.dtype = num_heads, dtype
        self.handle = _kernels.Attention(num_heads, code, code, scale, causal, window, softcap, split_keys, int16)

    def _extras(self, tokens: int, sinks: Tensor | None, lse: Tensor | None) -> tuple[int, int]:
        sinks_at = 0 if sinks is None else float32_address(sinks, "sinks", (self.num_heads,))
        return sinks_at, 0 if lse is None else float32_address(lse, "lse", (tokens, self.num_heads))

    def paged(
        self,
        query: Tensor,
        planes: KvPlanes,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed queries over the paged cache; see `attention`."""
        tokens, requests = query.shape[0], seq_lens.shape[0]
        parts = head_parts(query, "query", self.num_heads, planes.head_dim)
        require(query.dtype == self.dtype, f"query must be {self.dtype}, got {query.dtype}")
        starts, lens = int32_address(query_start_loc, "query_start_loc"), int32_address(seq_lens, "seq_lens")
        table = int32_address(block_table, "block_table", 2)
        require(query_start_loc.shape[0] == requests + 1, "query_start_loc must have one entry more than seq_lens")
        require(block_table.shape[0] >= requests, "block_table must have a row for each request")
        if out is None:
            out = empty((tokens, self.num_heads, planes.v_head_dim), self.dtype)
        out_parts = head_parts(out, "out", self.num_heads, planes.v_head_dim)
        extras = self._extras(tokens, sinks, lse)
        self.handle.paged(
            planes.handle, *parts, *out_parts, requests, starts, lens, table, block_table.stride(0), *extras
        )
        return out

    def ragged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of packed queries over packed keys; see `attention_ragged`."""
        tokens, (kv_heads, head_dim), v_dim = query.shape[0], key.shape[1:], value.shape[2]
        require(query.dtype == key.dtype == value.dtype == self.dtype, f"query, key and value must be {self.dtype}")
        require(head_dim % 2 == 0, f"head_dim must be even, got {head_dim}")
        query_parts = head_parts(query, "query", self.num_heads, head_dim)
        key_parts, value_parts = head_parts(key, "key", kv_heads, head_dim), head_parts(value, "value", kv_heads, v_dim)
        starts, key_starts = (
            int32_address(query_start_loc, "query_start_loc"),
            int32_address(key_start_loc, "key_start_loc"),
        )
        require(query_start_loc.shape == key_start_loc.shape, "both start_loc must have one entry a request and one")
        if out is None:
            out = empty((tokens, self.num_heads, v_dim), self.dtype)
        out_parts = head_parts(out, "out", self.num_heads, v_dim)
        extras = self._extras(tokens, sinks, lse)
        requests = query_start_loc.shape[0] - 1
        self.handle.ragged(
            kv_heads, head_dim, v_dim, *query_parts, *key_parts, *value_parts, *out_parts, requests, starts, key_starts,
            *extras,
        )  # fmt: skip
        return out


def attention(
    query: Tensor,
    planes: KvPlanes,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    split_keys: int = 0,
    int16: bool = False,
) -> Tensor:
    """Softmax attention over the paged cache, for prefill, chunk, decode and mixed batches.

    Query i of request r stands at position seq_len - query_len + i. Blocks past seq_len, blocks out of the window
    and the null block 0 are not read.

    Args:
        query: [t, num_heads, head_dim], contiguous in the last dim, read-only.
        query_start_loc: [r + 1], int32.
        seq_lens: [r], int32: keys of each request, those of this step included.
        block_table: [>= r, max_blocks], int32.
        sinks: [num_heads], float32: a logit for each head that joins the denominator alone.
        lse: [t, num_heads], float32, written: natural log of the sum of exponentials, sinks included.

    Returns:
        [t, num_heads, v_head_dim], dtype of query.
    """
    kernel = AttentionKernel(
        query.shape[1],
        query.dtype,
        scale,
        causal=causal,
        window=window,
        softcap=softcap,
        split_keys=split_keys,
        int16=int16,
    )
    return kernel.paged(query, planes, query_start_loc, seq_lens, block_table, sinks=sinks, lse=lse)


def attention_ragged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    key_start_loc: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    split_keys: int = 0,
) -> Tensor:
    """As `attention`, with keys and values packed like the queries instead of cached.

    Args:
        key: [tk, num_kv_heads, head_dim]; request r owns rows [key_start_loc[r], key_start_loc[r + 1]).
        value: [tk, num_kv_heads, v_head_dim].
        key_start_loc: [r + 1], int32.
    """
    kernel = AttentionKernel(
        query.shape[1], query.dtype, scale, causal=causal, window=window, softcap=softcap, split_keys=split_keys
    )
    return kernel.ragged(query, key, value, query_start_loc, key_start_loc, sinks=sinks, lse=lse)
