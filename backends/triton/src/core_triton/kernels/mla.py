"""Latent attention: one latent key and value for all heads, over every key or over the chosen ones."""

import triton
import triton.language as tl

from core_triton.kernels.block_table import blocks_of_tile
from core_triton.kernels.logits import add_by_pieces
from core_triton.kernels.requests import request_of_tile
from core_triton.kernels.softmax import LOG2E, finish, online, share_of_tiles

__all__ = ["mla_kernel"]


@triton.jit
def mla_kernel(
    q_latent,
    q_rope,
    cache,
    indices,
    out,
    lse,
    starts,
    seq_lens,
    block_table,
    num_requests,
    num_tokens,
    heads,
    top_k,
    scale,
    ql_stride,
    ql_head_stride,
    qr_stride,
    qr_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    index_stride,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    SPARSE: tl.constexpr,
    LSE: tl.constexpr,
    ONE_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Grid (tiles of queries, blocks of heads, parts of the keys). A tile is BLOCK_Q tokens times BLOCK_H heads.

    Part s writes plane s of `out` [parts, num_tokens, heads, LATENT] and of `lse` [parts, num_tokens, heads].

    Args:
        SPARSE: Whether the keys are those of `indices` [num_tokens, top_k]; BLOCK_Q is 1 then.
        ONE_TILE: Whether no request has more than BLOCK_Q tokens: tile r is request r then.
        BLOCK_P: Elements of the latent that a product of queries and keys takes at a time. Less than BLOCK_L: read
            again for each tile of keys, where registers do not hold whole queries beside the sum.
    """
    tile = tl.program_id(0)
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
    index = first_query + rows // BLOCK_H
    head = tl.program_id(1) * BLOCK_H + rows % BLOCK_H
    row_mask = (rows < BLOCK_Q * BLOCK_H) & (index < query_len) & (head < heads)
    token = (start + index).to(tl.int64)
    position = seq_len - query_len + index
    dims, r_dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    q_rows = q_latent + token * ql_stride + head * ql_head_stride
    if BLOCK_P == BLOCK_L:
        q = tl.load(q_rows[:, None] + dims[None, :], mask=row_mask[:, None] & (dims < LATENT)[None, :], other=0.0)
    q_turned = tl.load(
        q_rope + (token * qr_stride + head * qr_head_stride)[:, None] + r_dims[None, :],
        mask=row_mask[:, None] & (r_dims < ROPE)[None, :],
        other=0.0,
    )

    end = tl.minimum(seq_len, seq_len - query_len + first_query + BLOCK_Q)
    if SPARSE:
        first, last = share_of_tiles(0, top_k, BLOCK_N)
    else:
        first, last = share_of_tiles(0, end, BLOCK_N)
    factor = scale * LOG2E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for at in range(first, last, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        inside = keys < last
        if SPARSE:
            chosen = indices + (start + first_query).to(tl.int64) * index_stride + keys
            keys = tl.load(chosen, mask=inside, other=-1)
            inside = (keys >= 0) & (keys < end)
        if SPARSE:
            block = tl.load(block_table + request * table_stride + keys // PAGE, mask=inside, other=0)
        else:
            block = blocks_of_tile(block_table + request * table_stride, at, last, PAGE, BLOCK_N)
        inside = inside & (block != 0)
        row = cache + block.to(tl.int64) * block_stride + keys % PAGE * slot_stride
        latent = tl.load(row[:, None] + dims[None, :], mask=inside[:, None] & (dims < LATENT)[None, :], other=0.0).to(
            q_turned.dtype
        )
        turned = tl.load(
            row[:, None] + LATENT + r_dims[None, :], mask=inside[:, None] & (r_dims < ROPE)[None, :], other=0.0
        ).to(q_turned.dtype)
        logits = tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
        if BLOCK_P == BLOCK_L:
            logits += tl.dot(q, tl.trans(latent), input_precision="ieee")
        else:
            logits = add_by_pieces(logits, q_rows, row_mask, row, inside, LATENT, BLOCK_P)
        # A key out of sight counts as one that is still to come: one comparison an element.
        keys = tl.where(inside, keys, 2147483647)
        logits = tl.where(keys[None, :] <= position[:, None], logits * factor, float("-inf"))
        weights, rescale, peak, total = online(logits, peak, total)
        summed = summed * rescale[:, None] + tl.dot(weights.to(q_turned.dtype), latent, input_precision="ieee")

    divisor, log_sum = finish(peak, total)
    result = summed / divisor[:, None]
    place = (tl.program_id(2).to(tl.int64) * num_tokens + token) * heads + head
    tl.store(
        out + place[:, None] * LATENT + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=row_mask[:, None] & (dims < LATENT)[None, :],
    )
    if LSE:
        tl.store(lse + place, log_sum, mask=row_mask)
