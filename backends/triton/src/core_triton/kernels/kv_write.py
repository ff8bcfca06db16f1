"""Stores keys and values of tokens into slots of a paged cache."""

import triton
import triton.language as tl

from core_triton.kernels.cache_types import kept

__all__ = ["kv_write_kernel", "write_heads"]


@triton.jit
def write_heads(
    x,
    plane,
    scale,
    token,
    slot,
    x_stride,
    x_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    scale_stride,
    low,
    high,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's HEADS x DIM elements, BLOCK at a time."""
    to = plane + (slot // PAGE).to(tl.int64) * block_stride + (slot % PAGE) * slot_stride
    for begin in range(0, HEADS * DIM, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        head, dim, inside = at // DIM, at % DIM, at < HEADS * DIM
        values = tl.load(x + token.to(tl.int64) * x_stride + head * x_head_stride + dim, mask=inside, other=0.0)
        if SCALES:
            divisor = tl.load(scale + head * scale_stride, mask=inside, other=1.0)
            stored = kept(values.to(tl.float32) / divisor, low, high, KIND, plane)
        else:
            stored = kept(values.to(tl.float32), low, high, KIND, plane)
        tl.store(to + head * head_stride + dim, stored, mask=inside)


@triton.jit
def kv_write_kernel(
    key,
    value,
    key_plane,
    value_plane,
    slots,
    k_scale,
    v_scale,
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
    scale_stride,
    low,
    high,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (tokens). A token of slot -1 is written nowhere.

    Args:
        V_DIM: 0 where there are no values.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    write_heads(
        key,
        key_plane,
        k_scale,
        token,
        slot,
        k_stride,
        k_head_stride,
        kp_block_stride,
        kp_stride,
        kp_head_stride,
        scale_stride,
        low,
        high,
        HEADS,
        HEAD_DIM,
        PAGE,
        KIND,
        SCALES,
        BLOCK,
    )
    if V_DIM > 0:
        write_heads(
            value,
            value_plane,
            v_scale,
            token,
            slot,
            v_stride,
            v_head_stride,
            vp_block_stride,
            vp_stride,
            vp_head_stride,
            scale_stride,
            low,
            high,
            HEADS,
            V_DIM,
            PAGE,
            KIND,
            SCALES,
            BLOCK,
        )
