"""Scores of the positions that sparse attention may read, as keys whose order is the order of choice."""

import triton
import triton.language as tl

from core_triton.kernels.block_table import blocks_of_tile
from core_triton.kernels.requests import request_of_token

__all__ = ["index_scores_kernel"]


@triton.jit
def index_scores_kernel(
    query,
    weights,
    cache,
    out,
    starts,
    seq_lens,
    block_table,
    num_requests,
    first_token,
    width,
    heads,
    q_stride,
    q_head_stride,
    w_stride,
    block_stride,
    slot_stride,
    table_stride,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t, s] = (order of the score as int32) * 2^31 + (2^31 - 1 - s), so that the largest is the first choice:
    equal scores leave the lower position first. A key out of sight has the smallest int64.

    Grid (tokens, blocks of BLOCK_N positions); `out` is contiguous, [tokens, width], and starts with `first_token`.
    """
    row = tl.program_id(0)
    token = first_token + row
    request = request_of_token(starts, num_requests, token)
    position = tl.load(seq_lens + request) - tl.load(starts + request + 1) + token
    first = tl.program_id(1) * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    to = out + row.to(tl.int64) * width + keys
    inside = keys <= position
    seen = tl.minimum(position + 1, width)
    block = blocks_of_tile(block_table + request * table_stride, first, seen, PAGE, BLOCK_N)
    inside = inside & (block != 0)
    dims, rows = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_M)
    at = cache + block.to(tl.int64) * block_stride + keys % PAGE * slot_stride
    k = tl.load(at[:, None] + dims[None, :], mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)
    k = k.to(query.dtype.element_ty)
    score = tl.zeros([BLOCK_N], tl.float32)
    for begin in range(0, heads, BLOCK_M):
        head = begin + rows
        q = tl.load(
            query + token.to(tl.int64) * q_stride + (head * q_head_stride)[:, None] + dims[None, :],
            mask=(head < heads)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        weight = tl.load(weights + token.to(tl.int64) * w_stride + head, mask=head < heads, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        score += tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
    # Two zeros are equal, their bits are not.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    choice = (order << 31) + (0x7FFFFFFF - keys)
    tl.store(to, tl.where(inside, choice, -0x7FFFFFFFFFFFFFFF - 1), mask=keys < width)
