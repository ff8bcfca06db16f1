"""Attention over a paged cache or over the step's own keys: prefill, chunks, decode and mixed batches alike."""

import triton
import triton.language as tl

from core_triton.kernels.block_table import blocks_of_tile
from core_triton.kernels.logits import add_by_pieces
from core_triton.kernels.requests import request_of_tile
from core_triton.kernels.softmax import LOG2E, finish, join_sink, online, share_of_tiles

__all__ = ["attention_kernel"]


@triton.jit
def attention_kernel(
    query,
    key,
    value,
    out,
    lse,
    starts,
    seq_lens,
    block_table,
    k_scale,
    v_scale,
    sinks,
    num_requests,
    num_tokens,
    scale,
    softcap,
    window,
    q_stride,
    q_head_stride,
    k_block_stride,
    k_stride,
    k_head_stride,
    v_block_stride,
    v_stride,
    v_head_stride,
    table_stride,
    scale_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALES: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Grid (tiles of queries, key heads, parts of the keys). A tile is BLOCK_Q tokens of a request times the GROUP
    query heads of one key head, so that a key is read once for all of them.

    Part s writes plane s of `out` [parts, num_tokens, heads, V_DIM] and of `lse` [parts, num_tokens, heads].

    Args:
        ONE_TILE: Whether no request has more than BLOCK_Q tokens: tile r is request r then.
        BLOCK_P: Elements of a head that a product of queries and keys takes at a time, BLOCK_D for all of them.
        PAGE: Tokens a block of the cache; 0 where key and value are the step's own, [num_tokens, heads, dim].
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    if ONE_TILE:
        request = tile
        first_query = 0
    else:
        request = request_of_tile(starts, num_requests, tile, BLOCK_Q)
        first_query = (tile - ((tl.load(starts + request) - tl.load(starts)) // BLOCK_Q + request)) * BLOCK_Q
    start = tl.load(starts + request)
    query_len = tl.load(starts + request + 1) - start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + request)

    rows = tl.arange(0, BLOCK_M)
    index = first_query + rows // GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (index < query_len)
    token = (start + index).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    position = seq_len - query_len + index
    dims, v_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    word = query.dtype.element_ty
    q_rows = query + token * q_stride + head * q_head_stride
    if BLOCK_P == BLOCK_D:
        q = tl.load(q_rows[:, None] + dims[None, :], mask=row_mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)

    begin, end = 0, seq_len
    first_position = seq_len - query_len + first_query
    if CAUSAL:
        end = tl.minimum(seq_len, first_position + BLOCK_Q)
        if WINDOW:
            begin = tl.maximum(0, first_position - window + 1)
    first, last = share_of_tiles(begin, end, BLOCK_N)
    factor = scale * LOG2E
    if SCALES:
        k_factor = tl.load(k_scale + kv_head * scale_stride)
        scale = scale * k_factor
        factor = factor * k_factor

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(first, last, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        inside = keys < last
        if PAGE > 0:
            block = blocks_of_tile(block_table + request * table_stride, at, last, PAGE, BLOCK_N)
            inside = inside & (block != 0)
            k_at = block.to(tl.int64) * k_block_stride + keys % PAGE * k_stride
            v_at = block.to(tl.int64) * v_block_stride + keys % PAGE * v_stride
        else:
            k_at = (start + keys).to(tl.int64) * k_stride
            v_at = (start + keys).to(tl.int64) * v_stride
        k_rows = key + k_at + kv_head * k_head_stride
        if BLOCK_P == BLOCK_D:
            k = tl.load(k_rows[:, None] + dims[None, :], mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            logits = tl.dot(q, tl.trans(k.to(word)), input_precision="ieee")
        else:
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            logits = add_by_pieces(logits, q_rows, row_mask, k_rows, inside, HEAD_DIM, BLOCK_P)
        if SOFTCAP:
            bent = 1.0 - 2.0 / (tl.exp2(logits * (scale / softcap * (2.0 * LOG2E))) + 1.0)
            logits = bent * (softcap * LOG2E)
        else:
            logits = logits * factor
        if CAUSAL:
            # A key out of sight counts as one that is still to come: one comparison an element.
            keys = tl.where(inside, keys, 2147483647)
            if WINDOW:
                # Without a sign, a key that is still to come is far away.
                distance = (position[:, None] - keys[None, :]).to(tl.uint32, bitcast=True)
                seen = distance < tl.cast(window, tl.uint32)
            else:
                seen = keys[None, :] <= position[:, None]
        else:
            seen = inside[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        weights, rescale, peak, total = online(logits, peak, total)
        v = tl.load(
            value + (v_at + kv_head * v_head_stride)[:, None] + v_dims[None, :],
            mask=inside[:, None] & (v_dims < V_DIM)[None, :],
            other=0.0,
        ).to(word)
        summed = summed * rescale[:, None] + tl.dot(weights.to(word), v, input_precision="ieee")

    if SINKS:
        sink = tl.load(sinks + head, mask=row_mask, other=0.0) * LOG2E
        rescale, peak, total = join_sink(sink, peak, total)
        summed = summed * rescale[:, None]
    divisor, log_sum = finish(peak, total)
    result = summed / divisor[:, None]
    if SCALES:
        result = result * tl.load(v_scale + kv_head * scale_stride)
    heads = tl.num_programs(1) * GROUP
    row = (tl.program_id(2).to(tl.int64) * num_tokens + token) * heads + head
    tl.store(
        out + row[:, None] * V_DIM + v_dims[None, :],
        result.to(out.dtype.element_ty),
        mask=row_mask[:, None] & (v_dims < V_DIM)[None, :],
    )
    if LSE:
        tl.store(lse + row, log_sum, mask=row_mask)
