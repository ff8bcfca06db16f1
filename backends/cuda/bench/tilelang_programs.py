"""Three operations as TileLang programs, for their source and machine code to be laid beside Triton's."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

__all__ = ["PROGRAMS"]


def fp8_gemm(rows: int = 4096, columns: int = 4096, depth: int = 7168, *, tile: int = 128, stages: int = 3) -> Any:
    """x [rows, depth] e4m3, a scale a row and 128 columns, times weight [columns, depth], one a 128x128 block."""
    block = 128

    @T.prim_func
    def main(
        x: T.Tensor((rows, depth), "float8_e4m3fn"),
        x_scale: T.Tensor((rows, depth // block), "float32"),
        weight: T.Tensor((columns, depth), "float8_e4m3fn"),
        weight_scale: T.Tensor((columns // block, depth // block), "float32"),
        out: T.Tensor((rows, columns), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(columns, tile), T.ceildiv(rows, tile), threads=256) as (bx, by):
            a = T.alloc_shared((tile, block), "float8_e4m3fn")
            b = T.alloc_shared((tile, block), "float8_e4m3fn")
            part = T.alloc_fragment((tile, tile), "float32")
            total = T.alloc_fragment((tile, tile), "float32")
            factor = T.alloc_fragment((tile,), "float32")
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(depth, block), num_stages=stages):
                T.copy(x[by * tile, k * block], a)
                T.copy(weight[bx * tile, k * block], b)
                for i in T.Parallel(tile):
                    factor[i] = x_scale[by * tile + i, k] * weight_scale[bx * tile // block, k]
                T.clear(part)
                T.gemm(a, b, part, transpose_B=True)
                for i, j in T.Parallel(tile, tile):
                    total[i, j] += part[i, j] * factor[i]
            T.copy(total, out[by * tile, bx * tile])

    return main


def mla_decode(batch: int = 32, heads: int = 64, length: int = 4096, *, keys: int = 64, threads: int = 256) -> Any:
    """One token a request over its latent keys of 512 + 64; the values are the first 512."""
    latent, rope, scale = 512, 64, 576**-0.5 * 1.44269504

    @T.prim_func
    def main(
        q: T.Tensor((batch, heads, latent), "bfloat16"),
        q_rope: T.Tensor((batch, heads, rope), "bfloat16"),
        cache: T.Tensor((batch, length, latent), "bfloat16"),
        cache_rope: T.Tensor((batch, length, rope), "bfloat16"),
        out: T.Tensor((batch, heads, latent), "bfloat16"),
    ):
        with T.Kernel(heads // 64, batch, threads=threads) as (bx, by):
            qs = T.alloc_shared((64, latent), "bfloat16")
            qr = T.alloc_shared((64, rope), "bfloat16")
            ks = T.alloc_shared((keys, latent), "bfloat16")
            kr = T.alloc_shared((keys, rope), "bfloat16")
            ps = T.alloc_shared((64, keys), "bfloat16")
            logits = T.alloc_fragment((64, keys), "float32")
            total = T.alloc_fragment((64, latent), "float32")
            peak, before = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            rescale, summed = T.alloc_fragment((64,), "float32"), T.alloc_fragment((64,), "float32")
            divisor = T.alloc_fragment((64,), "float32")
            T.copy(q[by, bx * 64 : (bx + 1) * 64, :], qs)
            T.copy(q_rope[by, bx * 64 : (bx + 1) * 64, :], qr)
            T.fill(total, 0)
            T.fill(divisor, 0)
            T.fill(peak, -T.infinity("float32"))
            for k in T.Pipelined(T.ceildiv(length, keys), num_stages=1):
                T.copy(cache[by, k * keys : (k + 1) * keys, :], ks)
                T.copy(cache_rope[by, k * keys : (k + 1) * keys, :], kr)
                T.clear(logits)
                T.gemm(qs, ks, logits, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.gemm(qr, kr, logits, transpose_B=True, policy=T.GemmWarpPolicy.FullCol)
                T.copy(peak, before)
                T.reduce_max(logits, peak, dim=1, clear=False)
                for i in T.Parallel(64):
                    rescale[i] = T.exp2(before[i] * scale - peak[i] * scale)
                for i, j in T.Parallel(64, keys):
                    logits[i, j] = T.exp2(logits[i, j] * scale - peak[i] * scale)
                T.reduce_sum(logits, summed, dim=1)
                T.copy(logits, ps)
                for i in T.Parallel(64):
                    divisor[i] = divisor[i] * rescale[i] + summed[i]
                for i, j in T.Parallel(64, latent):
                    total[i, j] *= rescale[i]
                T.gemm(ps, ks, total, policy=T.GemmWarpPolicy.FullCol)
            for i, j in T.Parallel(64, latent):
                total[i, j] /= divisor[i]
            T.copy(total, out[by, bx * 64 : (bx + 1) * 64, :])

    return main


def prefill_attention(
    heads: int = 32, kv_heads: int = 8, length: int = 4096, *, tile: int = 128, keys: int = 64
) -> Any:
    """Causal attention of one prompt with heads of 128."""
    dim, scale = 128, 128**-0.5 * 1.44269504

    @T.prim_func
    def main(
        q: T.Tensor((1, length, heads, dim), "bfloat16"),
        k: T.Tensor((1, length, kv_heads, dim), "bfloat16"),
        v: T.Tensor((1, length, kv_heads, dim), "bfloat16"),
        out: T.Tensor((1, length, heads, dim), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(length, tile), heads, threads=256) as (bx, by):
            qs = T.alloc_shared((tile, dim), "bfloat16")
            ks = T.alloc_shared((keys, dim), "bfloat16")
            vs = T.alloc_shared((keys, dim), "bfloat16")
            logits = T.alloc_fragment((tile, keys), "float32")
            weights = T.alloc_fragment((tile, keys), "bfloat16")
            total = T.alloc_fragment((tile, dim), "float32")
            peak, before = T.alloc_fragment((tile,), "float32"), T.alloc_fragment((tile,), "float32")
            rescale, summed = T.alloc_fragment((tile,), "float32"), T.alloc_fragment((tile,), "float32")
            divisor = T.alloc_fragment((tile,), "float32")
            head = by // (heads // kv_heads)
            T.copy(q[0, bx * tile, by, 0], qs)
            T.fill(total, 0)
            T.fill(divisor, 0)
            T.fill(peak, -T.infinity("float32"))
            for n in T.Pipelined(T.ceildiv((bx + 1) * tile, keys), num_stages=2):
                T.copy(k[0, n * keys : (n + 1) * keys, head, :], ks)
                for i, j in T.Parallel(tile, keys):
                    logits[i, j] = T.if_then_else(bx * tile + i >= n * keys + j, 0, -T.infinity("float32"))
                T.gemm(qs, ks, logits, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(peak, before)
                T.reduce_max(logits, peak, dim=1, clear=False)
                for i in T.Parallel(tile):
                    rescale[i] = T.exp2(before[i] * scale - peak[i] * scale)
                for i, j in T.Parallel(tile, keys):
                    logits[i, j] = T.exp2(logits[i, j] * scale - peak[i] * scale)
                T.reduce_sum(logits, summed, dim=1)
                for i in T.Parallel(tile):
                    divisor[i] = divisor[i] * rescale[i] + summed[i]
                T.copy(logits, weights)
                for i, j in T.Parallel(tile, dim):
                    total[i, j] *= rescale[i]
                T.copy(v[0, n * keys : (n + 1) * keys, head, :], vs)
                T.gemm(weights, vs, total, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(tile, dim):
                total[i, j] /= divisor[i]
            T.copy(total, out[0, bx * tile, by, 0])

    return main


PROGRAMS = {"fp8_gemm": fp8_gemm, "mla_decode": mla_decode, "prefill_attention": prefill_attention}
