"""mla: latent attention, dense and sparse, for decode and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import Capture, Verdict, torch_dtype
from core.backend.ops import Determinism, MlaArgs, MlaOp
from core.spec import DType
from core_triton.ops.caches import CACHE_WORDS, LIMITS, cache_words, num_parts, page_of, refuse_cache
from core_triton.ops.merge import join_parts
from core_triton.ops.refusals import FLOATS, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__: list[str] = []

_FEATURES = ("sparse", "lse")
_MOST_LATENT = 512


def _tuning(rows: int, op: MlaOp, target: Target) -> Tuning:
    """For tiles of which `rows` rows have work."""
    found = tunings("mla", target)
    name = "few" if rows <= found["few"]["BLOCK_M"] else "many"
    if op.dtype is DType.FLOAT32:
        return found[f"{name}_f32"]
    return found.get(f"{name}_c8", found[name]) if op.kv_dtype in LIMITS else found[name]


def _constants(op: MlaOp, tuning: Tuning, *, page: int, last_pass: bool, one_tile: bool) -> dict[str, Any]:
    block_h = min(power_of_two(op.num_heads), tuning["BLOCK_M"])
    block_l = max(16, power_of_two(op.latent_dim))
    per_token = op.has("sparse") or op.determinism >= Determinism.D3
    return {
        "LATENT": op.latent_dim,
        "ROPE": op.rope_dim,
        "PAGE": page,
        "SPARSE": op.has("sparse"),
        "LSE": op.has("lse") or not last_pass,
        "ONE_TILE": one_tile,
        "BLOCK_M": tuning["BLOCK_M"],
        "BLOCK_N": tuning["BLOCK_N"],
        "BLOCK_H": block_h,
        "BLOCK_L": block_l,
        "BLOCK_R": max(16, power_of_two(op.rope_dim)),
        "BLOCK_P": min(tuning.sizes.get("BLOCK_P", block_l), block_l),
        "BLOCK_Q": 1 if per_token else tuning["BLOCK_M"] // block_h,
    }


class _Mla:
    """The bound operation."""

    def __init__(self, op: MlaOp, target: Target) -> None:
        self._op = op
        self._dtype = torch_dtype(op.dtype)
        self._fixed = op.determinism >= Determinism.D2
        # Of a token alone, and of a tile that several tokens may fill.
        self._few = _tuning(op.num_heads, op, target)
        self._many = self._few if op.determinism >= Determinism.D3 else _tuning(1 << 16, op, target)

    def __call__(self, args: MlaArgs) -> Tensor:
        from core_triton.kernels.mla import mla_kernel

        op, plan, page = self._op, args.plan, page_of(args.cache)
        batch, tokens = plan.batch, args.q_latent.shape[0]
        shape = (tokens, op.num_heads, op.latent_dim)
        out = torch.empty(shape, dtype=self._dtype, device=args.q_latent.device)
        if not tokens:
            return out
        few = not self._fixed and batch.max_query_len * op.num_heads <= self._few["BLOCK_M"]
        tuning = self._few if few or op.has("sparse") else self._many
        sizes = _constants(op, tuning, page=page, last_pass=True, one_tile=False)
        sizes["ONE_TILE"] = one_tile = batch.max_query_len <= sizes["BLOCK_Q"]
        tiles = batch.num_reqs if one_tile else tokens // sizes["BLOCK_Q"] + batch.num_reqs
        blocks = -(-op.num_heads // sizes["BLOCK_H"])
        parts = num_parts(tuning, plan, tiles * blocks, page, fixed=self._fixed)
        results, lses = out, args.lse
        if parts > 1:
            sizes["LSE"] = True
            results = torch.empty((parts, *shape), dtype=torch.float32, device=out.device)
            lses = torch.empty((parts, *shape[:2]), dtype=torch.float32, device=out.device)
        indices = plan.block_table if args.indices is None else args.indices
        mla_kernel[(tiles, blocks, parts)](
            *(args.q_latent, args.q_rope, args.cache[0], indices, results, results if lses is None else lses),
            *(plan.query_start_loc, plan.seq_lens, plan.block_table, batch.num_reqs, tokens, op.num_heads),
            *(indices.shape[1], op.scale, *args.q_latent.stride()[:2], *args.q_rope.stride()[:2]),
            *(*args.cache[0].stride()[:2], plan.block_table.stride(0), indices.stride(0)),
            **sizes,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )
        if parts > 1:
            assert lses is not None
            join_parts(results, lses, out, args.lse)
        return out


def _refuse(op: MlaOp, target: Target) -> str:
    if op.latent_dim > _MOST_LATENT:
        return f"no kernel for latents of more than {_MOST_LATENT}"
    return refuse_form(op, _FEATURES) or refuse_cache(op.kv_dtype, target)


def _verdict(op: MlaOp, target: Target) -> Verdict:
    return Verdict.native(capture=Capture.UNIFORM, determinism=max(op.determinism, Determinism.D1))


_POINTERS = {"q_latent": "", "q_rope": "", "cache": "", "indices": "*i32", "out": "", "lse": "*fp32"}
_NUMBERS = ("num_requests", "num_tokens", "heads", "top_k")
_STRIDES = (
    *("ql_stride", "ql_head_stride", "qr_stride", "qr_head_stride"),
    *("block_stride", "slot_stride", "table_stride", "index_stride"),
)


def _build(label: str, op: MlaOp, rows: int, target: Target, page: int = 64) -> Build:
    from core_triton.kernels.mla import mla_kernel

    tuning, word = _tuning(rows, op, target), FLOATS[op.dtype]
    few = rows <= op.num_heads
    pointers = dict(_POINTERS) | dict.fromkeys(("q_latent", "q_rope"), f"*{word}")
    pointers |= {"cache": f"*{CACHE_WORDS[op.kv_dtype]}", "out": "*fp32" if few else f"*{word}"}
    return Build(
        kernel=mla_kernel,
        label=label,
        signature={
            **pointers,
            **dict.fromkeys(("starts", "seq_lens", "block_table"), "*i32"),
            **dict.fromkeys(_NUMBERS, "i32"),
            "scale": "fp32",
            **dict.fromkeys(_STRIDES, "i32"),
        },
        constexprs=_constants(op, tuning, page=page, last_pass=not few, one_tile=few),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        matrix=op.dtype is not DType.FLOAT32,
        divisible=("q_latent", "q_rope", "cache", "out", *_STRIDES[:6]),
    )


def _builds(target: Target) -> Sequence[Build]:
    def op(dtype: DType, heads: int, kv_dtype: DType | None = None, *features: str) -> MlaOp:
        return MlaOp(
            dtype=dtype, num_heads=heads, latent_dim=512, rope_dim=64, kv_dtype=kv_dtype or dtype, scale=1.0,
            features=frozenset(features),
        )  # fmt: skip

    found = []
    for dtype, word in FLOATS.items():
        found.append(_build(f"decode {word} 16 heads", op(dtype, 16), 16, target))
        found.append(_build(f"prefill {word} 16 heads", op(dtype, 16), 1 << 16, target))
    bf16 = DType.BFLOAT16
    found.append(_build("decode bf16 16 heads, blocks of 16", op(bf16, 16), 16, target, page=16))
    found.append(_build("decode bf16 128 heads", op(bf16, 128), 128, target))
    found.append(_build("sparse bf16 128 heads", op(bf16, 128, None, "sparse"), 128, target))
    found.append(_build("sparse bf16 16 heads", op(bf16, 16, None, "sparse"), 16, target))
    for dtype, word in cache_words(target).items():
        if dtype is not DType.INT8:
            found.append(_build(f"decode bf16 cache {word}", op(bf16, 16, dtype), 16, target))
    return found


register("mla", Kernel(refuse=_refuse, bind=_Mla, builds=_builds, verdict=_verdict))
