"""Rotation of query and key heads, their norms before it, and the cache write after it, in one pass over a token."""

import triton
import triton.language as tl

from core_triton.kernels.cache_types import kept

__all__ = ["rope_kernel"]


@triton.jit
def _turned(
    x,
    weight,
    cos_sin,
    head,
    position,
    head_stride,
    eps,
    offset,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """float32 [BLOCK_H, BLOCK_D]: heads of a token, normed where NORM, and rotated.

    An element's partner is read a second time: no other thread has to hand it over.
    """
    dims = tl.arange(0, BLOCK_D)
    inside = (head < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    values = tl.load(x + (head * head_stride)[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)[:, None]
        scale = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32) + offset
        values = values * factor * scale[None, :]
    if ROTARY > 0:
        rotated = dims < ROTARY
        if INTERLEAVED:
            partner = dims ^ 1
            angle = dims // 2
            sign = tl.where(dims % 2 == 0, -1.0, 1.0)
        else:
            partner = tl.where(dims < ROTARY // 2, dims + ROTARY // 2, dims - ROTARY // 2)
            angle = dims % (ROTARY // 2)
            sign = tl.where(dims < ROTARY // 2, -1.0, 1.0)
        mask = inside & rotated[None, :]
        others = tl.load(x + (head * head_stride)[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.load(weight + partner, mask=rotated, other=0.0).to(tl.float32) + offset
            others = others * factor * scale[None, :]
        row = cos_sin + position.to(tl.int64) * ROTARY
        cosine = tl.load(row + angle, mask=rotated, other=1.0)
        sine = tl.load(row + ROTARY // 2 + angle, mask=rotated, other=0.0) * sign
        values = values * cosine[None, :] + others * sine[None, :]
    return values


@triton.jit
def rope_kernel(
    query,
    key,
    value,
    q_out,
    k_out,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    key_plane,
    value_plane,
    slots,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    kp_block_stride,
    kp_stride,
    kp_head_stride,
    vp_block_stride,
    vp_stride,
    vp_head_stride,
    eps,
    offset,
    low,
    high,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Grid (tokens, programs of BLOCK_H heads): those of the query first, then those of the key.

    q_out and k_out are contiguous, [tokens, heads, HEAD_DIM].

    Args:
        PAGE: Tokens a block of the cache that gets key and value; 0 writes none.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = (HEADS + BLOCK_H - 1) // BLOCK_H
    position = 0
    if ROTARY > 0:
        position = tl.load(positions + token)
    dims = tl.arange(0, BLOCK_D)
    if part < query_parts:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        values = _turned(
            query + token * q_stride,
            q_weight,
            cos_sin,
            head,
            position,
            q_head_stride,
            eps,
            offset,
            HEADS,
            HEAD_DIM,
            ROTARY,
            INTERLEAVED,
            NORM,
            BLOCK_H,
            BLOCK_D,
        )
        inside = (head < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        to = q_out + token * HEADS * HEAD_DIM + (head * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(to, values.to(q_out.dtype.element_ty), mask=inside)
    else:
        head = (part - query_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        values = _turned(
            key + token * k_stride,
            k_weight,
            cos_sin,
            head,
            position,
            k_head_stride,
            eps,
            offset,
            KV_HEADS,
            HEAD_DIM,
            ROTARY,
            INTERLEAVED,
            NORM,
            BLOCK_H,
            BLOCK_D,
        )
        inside = (head < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        rounded = values.to(k_out.dtype.element_ty)
        to = k_out + token * KV_HEADS * HEAD_DIM + (head * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(to, rounded, mask=inside)
        if PAGE > 0:
            slot = tl.load(slots + token)
            # No name of the outer block is bound anew in here: Triton's types of a name are one.
            if slot >= 0:
                block, row = (slot // PAGE).to(tl.int64), slot % PAGE
                key_row = key_plane + block * kp_block_stride + row * kp_stride
                stored = kept(rounded.to(tl.float32), low, high, KIND, key_plane)
                tl.store(key_row + (head * kp_head_stride)[:, None] + dims[None, :], stored, mask=inside)
                v_dims = tl.arange(0, BLOCK_V)
                v_inside = (head < KV_HEADS)[:, None] & (v_dims < V_DIM)[None, :]
                v = tl.load(
                    value + token * v_stride + (head * v_head_stride)[:, None] + v_dims[None, :],
                    mask=v_inside,
                    other=0.0,
                )
                value_row = value_plane + block * vp_block_stride + row * vp_stride
                v_stored = kept(v.to(tl.float32), low, high, KIND, value_plane)
                tl.store(value_row + (head * vp_head_stride)[:, None] + v_dims[None, :], v_stored, mask=v_inside)
