"""mla_prolog: three launches: the latent into the cache, the queries' rotated part, the absorbed product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed, torch_dtype
from core.backend.ops import MlaPrologArgs, MlaPrologOp, RopeOp
from core.spec import DType
from core_triton.ops.caches import CACHE_WORDS, cache_words, page_of, refuse_cache
from core_triton.ops.kv_write import kind_of, limits_of
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rope import turn
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import tunings

__all__: list[str] = []


def _latent_sizes(op: MlaPrologOp, page: int) -> dict[str, Any]:
    return {
        "LATENT": op.latent_dim,
        "ROPE": op.rope_dim,
        "INTERLEAVED": op.interleaved,
        "PAGE": page,
        "KIND": kind_of(op.kv_dtype),
        "BLOCK_L": power_of_two(op.latent_dim),
        "BLOCK_R": power_of_two(op.rope_dim),
    }


def _absorb_tuning(op: MlaPrologOp, target: Target) -> Any:
    return tunings("mla", target)["absorb_f32" if op.dtype is DType.FLOAT32 else "absorb"]


def _dense(up: Packed, dtype: torch.dtype) -> Tensor:
    """[num_heads, latent_dim, nope_dim]; a quantized up-projection is widened at each call."""
    return up.tensors()["weight"] if up.scheme == "none" else up.dense().to(dtype).contiguous()


class _Prolog:
    """The bound operation."""

    def __init__(self, op: MlaPrologOp, target: Target) -> None:
        self._op, self._dtype = op, torch_dtype(op.dtype)
        self._limits = limits_of(op.kv_dtype)
        self._tuning = _absorb_tuning(op, target)
        self._rope = RopeOp(
            dtype=op.dtype,
            num_heads=op.num_heads,
            num_kv_heads=0,
            head_dim=op.rope_dim,
            rotary_dim=op.rope_dim,
            interleaved=op.interleaved,
        )

    def __call__(self, args: MlaPrologArgs) -> tuple[Tensor, Tensor]:
        from core_triton.kernels.mla_prolog import latent_write_kernel

        op, plane = self._op, args.cache[0]
        tokens = args.q.shape[0]
        if tokens:
            latent_write_kernel[(min(tokens, args.plan.slots.shape[0]),)](
                *(args.kv, args.kv_weight, args.positions, args.cos_sin, plane, args.plan.slots),
                *(args.kv.stride(0), *plane.stride()[:2], op.eps, *self._limits),
                **_latent_sizes(op, page_of(args.cache)),
                num_warps=4,
            )
        turned, _ = turn(
            self._rope, args.q[..., op.nope_dim :], args.q[:, :0, op.nope_dim :], args.positions, args.cos_sin
        )
        return self._absorbed(args.q, _dense(args.k_up, self._dtype)), turned

    def _absorbed(self, q: Tensor, up: Tensor) -> Tensor:
        from core_triton.kernels.mla_prolog import absorb_kernel

        op, tuning, tokens = self._op, self._tuning, q.shape[0]
        out = torch.empty((tokens, op.num_heads, op.latent_dim), dtype=q.dtype, device=q.device)
        if tokens:
            grid = (-(-tokens // tuning["BLOCK_M"]), -(-op.latent_dim // tuning["BLOCK_N"]), op.num_heads)
            absorb_kernel[grid](
                *(q, up, out, tokens, op.num_heads, *q.stride()[:2], *up.stride()[:2]),
                NOPE=op.nope_dim,
                LATENT=op.latent_dim,
                **tuning.sizes,
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
            )
        return out


def _refuse(op: MlaPrologOp, target: Target) -> str:
    return refuse_form(op) or refuse_cache(op.kv_dtype, target)


def _latent_build(label: str, op: MlaPrologOp) -> Build:
    from core_triton.kernels.mla_prolog import latent_write_kernel

    word = f"*{FLOATS[op.dtype]}"
    return Build(
        kernel=latent_write_kernel,
        label=label,
        signature={
            "kv": word,
            "weight": word,
            "positions": "*i32",
            "cos_sin": "*fp32",
            "cache": f"*{CACHE_WORDS[op.kv_dtype]}",
            "slots": "*i32",
            **dict.fromkeys(("kv_stride", "block_stride", "slot_stride"), "i32"),
            **dict.fromkeys(("eps", "low", "high"), "fp32"),
        },
        constexprs=_latent_sizes(op, 64),
        num_warps=4,
        num_stages=2,
        divisible=("kv", "weight", "cos_sin", "cache", "kv_stride", "block_stride", "slot_stride"),
    )


def _absorb_build(label: str, op: MlaPrologOp, target: Target) -> Build:
    from core_triton.kernels.mla_prolog import absorb_kernel

    tuning = _absorb_tuning(op, target)
    numbers = ("num_tokens", "heads", "q_stride", "q_head_stride", "up_head_stride", "up_stride")
    return Build(
        kernel=absorb_kernel,
        label=label,
        signature={**dict.fromkeys(("q", "up", "out"), f"*{FLOATS[op.dtype]}"), **dict.fromkeys(numbers, "i32")},
        constexprs={"NOPE": op.nope_dim, "LATENT": op.latent_dim, **tuning.sizes},
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        matrix=op.dtype is not DType.FLOAT32,
        divisible=("q", "up", "out", *numbers[2:]),
    )


def _builds(target: Target) -> Sequence[Build]:
    def op(dtype: DType, kv_dtype: DType) -> MlaPrologOp:
        return MlaPrologOp(
            dtype=dtype, num_heads=128, nope_dim=128, latent_dim=512, rope_dim=64, kv_dtype=kv_dtype, eps=1e-6
        )

    found = []
    for dtype, word in FLOATS.items():
        found.append(_latent_build(f"latent {word}", op(dtype, dtype)))
        found.append(_absorb_build(f"absorb {word}", op(dtype, dtype), target))
    for dtype, word in cache_words(target).items():
        found.append(_latent_build(f"latent cache {word}", op(DType.BFLOAT16, dtype)))
    return found


_binding: Callable[[Any, Target], Callable[[Any], Any]] = _Prolog
register("mla_prolog", Kernel(refuse=_refuse, bind=_binding, builds=_builds, verdict=invariant))
