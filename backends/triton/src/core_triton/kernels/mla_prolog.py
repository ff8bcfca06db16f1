"""What comes before latent attention: the latent's norm, rope and cache write, and the absorbed queries."""

import triton
import triton.language as tl

from core_triton.kernels.cache_types import kept

__all__ = ["absorb_kernel", "latent_write_kernel"]


@triton.jit
def latent_write_kernel(
    kv,
    weight,
    positions,
    cos_sin,
    cache,
    slots,
    kv_stride,
    block_stride,
    slot_stride,
    eps,
    low,
    high,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (tokens). A token of slot -1 is written nowhere."""
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    row = kv + token.to(tl.int64) * kv_stride
    to = cache + (slot // PAGE).to(tl.int64) * block_stride + (slot % PAGE) * slot_stride
    dims, r_dims = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    latent = tl.load(row + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
    scale = tl.load(weight + dims, mask=dims < LATENT, other=0.0).to(tl.float32)
    normed = (latent * tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps) * scale).to(kv.dtype.element_ty)
    tl.store(to + dims, kept(normed.to(tl.float32), low, high, KIND, cache), mask=dims < LATENT)

    if INTERLEAVED:
        partner = r_dims ^ 1
        angle = r_dims // 2
        sign = tl.where(r_dims % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(r_dims < ROPE // 2, r_dims + ROPE // 2, r_dims - ROPE // 2)
        angle = r_dims % (ROPE // 2)
        sign = tl.where(r_dims < ROPE // 2, -1.0, 1.0)
    inside = r_dims < ROPE
    key = tl.load(row + LATENT + r_dims, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(row + LATENT + partner, mask=inside, other=0.0).to(tl.float32)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROPE
    cosine = tl.load(angles + angle, mask=inside, other=1.0)
    sine = tl.load(angles + ROPE // 2 + angle, mask=inside, other=0.0) * sign
    turned = (key * cosine + others * sine).to(kv.dtype.element_ty)
    tl.store(to + LATENT + r_dims, kept(turned.to(tl.float32), low, high, KIND, cache), mask=inside)


@triton.jit
def absorb_kernel(
    q,
    up,
    out,
    num_tokens,
    heads,
    q_stride,
    q_head_stride,
    up_head_stride,
    up_stride,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, h, l] = sum over n of q[t, h, n] * up[h, l, n]. Grid (blocks of tokens, blocks of the latent, heads).

    `out` is contiguous, [num_tokens, heads, LATENT].
    """
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2)
    summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, NOPE, BLOCK_K):
        at = begin + tl.arange(0, BLOCK_K)
        a = tl.load(
            q + (token.to(tl.int64) * q_stride + head * q_head_stride)[:, None] + at[None, :],
            mask=(token < num_tokens)[:, None] & (at < NOPE)[None, :],
            other=0.0,
        )
        b = tl.load(
            up + head.to(tl.int64) * up_head_stride + (column * up_stride)[:, None] + at[None, :],
            mask=(column < LATENT)[:, None] & (at < NOPE)[None, :],
            other=0.0,
        )
        summed = tl.dot(a, tl.trans(b), summed, input_precision="ieee")
    tl.store(
        out + ((token.to(tl.int64) * heads + head) * LATENT)[:, None] + column[None, :],
        summed.to(out.dtype.element_ty),
        mask=(token < num_tokens)[:, None] & (column < LATENT)[None, :],
    )
