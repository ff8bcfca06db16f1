"""rope and qk_norm_rope_write: one kernel, a program for some heads of a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import QkNormRopeWriteArgs, QkNormRopeWriteOp, RopeArgs, RopeOp
from core.spec import DType
from core_triton.ops.caches import CACHE_WORDS, cache_words, page_of, refuse_cache
from core_triton.ops.kv_write import kind_of, limits_of
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__ = ["turn"]

_ELEMENTS = 2048
"""What a program holds of heads."""


def _constants(
    heads: int, kv_heads: int, head_dim: int, rotary_dim: int, interleaved: bool, v_dim: int = 0, norm: bool = False
) -> dict[str, Any]:
    block_d = power_of_two(head_dim)
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "V_DIM": v_dim,
        "ROTARY": rotary_dim,
        "INTERLEAVED": interleaved,
        "NORM": norm,
        "BLOCK_H": max(1, min(power_of_two(max(heads, kv_heads)), _ELEMENTS // block_d)),
        "BLOCK_D": block_d,
        "BLOCK_V": power_of_two(v_dim),
    }


def _programs(sizes: dict[str, Any]) -> int:
    return sum(-(-sizes[name] // sizes["BLOCK_H"]) for name in ("HEADS", "KV_HEADS"))


def turn(
    op: RopeOp | QkNormRopeWriteOp, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Query and key, rotated, in new tensors.

    Args:
        op: Heads and rotation.
        query: [T, num_heads, head_dim], contiguous in the last dim.
        key: [T, num_kv_heads, head_dim], as query.
        positions: [T], int32.
        cos_sin: [max_position, rotary_dim], float32, contiguous.
    """
    from core_triton.kernels.rope import rope_kernel

    sizes = _constants(op.num_heads, op.num_kv_heads, op.head_dim, op.rotary_dim, op.interleaved)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    if query.shape[0]:
        rope_kernel[(query.shape[0], _programs(sizes))](
            *(query, key, key, q_out, k_out, query, key, positions, cos_sin, key, key, positions),
            *(*query.stride()[:2], *key.stride()[:2], *[0] * 8, 0.0, 0.0, 0.0, 0.0),
            **sizes,
            PAGE=0,
            KIND="float",
            num_warps=4,
        )
    return q_out, k_out


def _bind_rope(op: RopeOp, target: Target) -> Callable[[RopeArgs], tuple[Tensor, Tensor]]:
    return lambda args: turn(op, args.query, args.key, args.positions, args.cos_sin)


def _bind_write(op: QkNormRopeWriteOp, target: Target) -> Callable[[QkNormRopeWriteArgs], tuple[Tensor, Tensor]]:
    from core_triton.kernels.rope import rope_kernel

    sizes = _constants(
        op.num_heads, op.num_kv_heads, op.head_dim, op.rotary_dim, op.interleaved, op.v_head_dim, op.has("qk_norm")
    )
    programs, kind, limits = _programs(sizes), kind_of(op.kv_dtype), limits_of(op.kv_dtype)

    def qk_norm_rope_write(args: QkNormRopeWriteArgs) -> tuple[Tensor, Tensor]:
        query, key, value = args.query, args.key, args.value
        planes = args.cache
        q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
        if query.shape[0]:
            rope_kernel[(query.shape[0], programs)](
                *(query, key, value, q_out, k_out),
                query if args.q_weight is None else args.q_weight,
                key if args.k_weight is None else args.k_weight,
                *(args.positions, args.cos_sin, planes[0], planes[1], args.plan.slots),
                *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
                *(*planes[0].stride()[:3], *planes[1].stride()[:3]),
                *(op.eps, op.weight_offset, *limits),
                **sizes,
                PAGE=page_of(planes),
                KIND=kind,
                num_warps=4,
            )
        return q_out, k_out

    return qk_norm_rope_write


def _refuse_write(op: QkNormRopeWriteOp, target: Target) -> str:
    if not op.v_head_dim:
        return "no kernel for a cache without values"
    return refuse_form(op, ("qk_norm",)) or refuse_cache(op.kv_dtype, target)


_STRIDES = (
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride"),
    *("kp_block_stride", "kp_stride", "kp_head_stride", "vp_block_stride", "vp_stride", "vp_head_stride"),
)
_POINTERS = ("query", "key", "value", "q_out", "k_out", "q_weight", "k_weight")


def _build(label: str, word: str, kept: DType, sizes: dict[str, Any], page: int) -> Build:
    from core_triton.kernels.rope import rope_kernel

    planes = f"*{CACHE_WORDS[kept]}"
    return Build(
        kernel=rope_kernel,
        label=label,
        signature={
            **dict.fromkeys(_POINTERS, f"*{word}"),
            "positions": "*i32",
            "cos_sin": "*fp32",
            "key_plane": planes,
            "value_plane": planes,
            "slots": "*i32",
            **dict.fromkeys(_STRIDES, "i32"),
            **dict.fromkeys(("eps", "offset", "low", "high"), "fp32"),
        },
        constexprs={**sizes, "PAGE": page, "KIND": kind_of(kept)},
        num_warps=4,
        num_stages=2,
        divisible=(*_POINTERS, "cos_sin", "key_plane", "value_plane", *_STRIDES),
    )


def _rope_builds(target: Target) -> Sequence[Build]:
    found = [
        _build(f"rope {word}", word, dtype, _constants(32, 8, 128, 128, False), 0) for dtype, word in FLOATS.items()
    ]
    found.append(_build("rope pairs 64", "bf16", DType.BFLOAT16, _constants(128, 1, 64, 64, True), 0))
    return found


def _write_builds(target: Target) -> Sequence[Build]:
    normed = _constants(32, 8, 128, 128, False, 128, True)
    found = [_build(f"write {word} norm", word, dtype, normed, 64) for dtype, word in FLOATS.items()]
    found.append(_build("write bf16", "bf16", DType.BFLOAT16, _constants(32, 8, 128, 128, False, 128), 64))
    found.append(_build("write partial", "bf16", DType.BFLOAT16, _constants(24, 4, 256, 64, False, 256, True), 64))
    for dtype, word in cache_words(target).items():
        found.append(_build(f"write cache {word}", "bf16", dtype, normed, 64))
    return found


register(
    "rope", Kernel(refuse=lambda op, target: refuse_form(op), bind=_bind_rope, builds=_rope_builds, verdict=invariant)
)
register(
    "qk_norm_rope_write",
    Kernel(refuse=_refuse_write, bind=_bind_write, builds=_write_builds, verdict=invariant),
)
