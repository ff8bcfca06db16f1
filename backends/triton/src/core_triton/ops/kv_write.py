"""kv_write: one program a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from core.backend.ops import KvWriteArgs, KvWriteOp
from core.spec import DType
from core_triton.ops.caches import CACHE_WORDS, LIMITS, cache_words, page_of, refuse_cache
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__ = ["kind_of", "limits_of"]

_MOST_ELEMENTS = 2048


def kind_of(kv_dtype: DType) -> str:
    """The kernels' word for how such a cache rounds."""
    return "int8" if kv_dtype is DType.INT8 else "float8" if kv_dtype in LIMITS else "float"


def limits_of(kv_dtype: DType) -> tuple[float, float]:
    """Smallest and largest number that is kept; (0, 0) where nothing saturates."""
    return LIMITS.get(kv_dtype, (0.0, 0.0))


def _block(op: KvWriteOp) -> int:
    return min(_MOST_ELEMENTS, power_of_two(op.num_kv_heads * max(op.head_dim, op.v_head_dim)))


def _bind(op: KvWriteOp, target: Target) -> Callable[[KvWriteArgs], None]:
    from core_triton.kernels.kv_write import kv_write_kernel

    low, high = limits_of(op.kv_dtype)
    kind, block = kind_of(op.kv_dtype), _block(op)

    def kv_write(args: KvWriteArgs) -> None:
        tokens = min(args.plan.slots.shape[0], args.key.shape[0])
        if not tokens:
            return
        key, plane = args.key, args.cache[0]
        value, value_plane = (key, plane) if args.value is None else (args.value, args.cache[1])
        scaled = args.k_scale is not None
        kv_write_kernel[(tokens,)](
            key,
            value,
            plane,
            value_plane,
            args.plan.slots,
            args.k_scale if scaled else key,
            args.v_scale if scaled else key,
            *key.stride()[:2],
            *value.stride()[:2],
            *plane.stride()[:3],
            *value_plane.stride()[:3],
            _scale_stride(args.k_scale),
            low,
            high,
            HEADS=op.num_kv_heads,
            HEAD_DIM=op.head_dim,
            V_DIM=op.v_head_dim,
            PAGE=page_of(args.cache),
            KIND=kind,
            SCALES=scaled,
            BLOCK=block,
            num_warps=4,
        )

    return kv_write


def _scale_stride(scale: Tensor | None) -> int:
    return 1 if scale is not None and scale.numel() > 1 else 0


def _refuse(op: KvWriteOp, target: Target) -> str:
    return refuse_form(op, ("scales",)) or refuse_cache(op.kv_dtype, target)


_NUMBERS = ("k_stride", "k_head_stride", "v_stride", "v_head_stride", "kp_block_stride", "kp_stride", "kp_head_stride")
_MORE_NUMBERS = ("vp_block_stride", "vp_stride", "vp_head_stride", "scale_stride")


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.kv_write import kv_write_kernel

    def build(label: str, word: str, kv_dtype: DType, heads: int, dim: int, v_dim: int, scaled: bool) -> Build:
        op = KvWriteOp(
            dtype=DType.BFLOAT16, num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, kv_dtype=kv_dtype
        )  # fmt: skip
        planes = f"*{CACHE_WORDS[kv_dtype]}"
        return Build(
            kernel=kv_write_kernel,
            label=label,
            signature={
                "key": f"*{word}",
                "value": f"*{word}",
                "key_plane": planes,
                "value_plane": planes,
                "slots": "*i32",
                "k_scale": "*fp32",
                "v_scale": "*fp32",
                **dict.fromkeys((*_NUMBERS, *_MORE_NUMBERS), "i32"),
                "low": "fp32",
                "high": "fp32",
            },
            constexprs={
                "HEADS": heads,
                "HEAD_DIM": dim,
                "V_DIM": v_dim,
                "PAGE": 64,
                "KIND": kind_of(kv_dtype),
                "SCALES": scaled,
                "BLOCK": _block(op),
            },
            num_warps=4,
            num_stages=2,
            divisible=("key", "value", "key_plane", "value_plane", *_NUMBERS, *_MORE_NUMBERS[:-1]),
        )

    found = [build(f"kv_write {word}", word, dtype, 8, 128, 128, False) for dtype, word in FLOATS.items()]
    found.append(build("kv_write latent", "bf16", DType.BFLOAT16, 1, 576, 0, False))
    for dtype, word in cache_words(target).items():
        found.append(build(f"kv_write cache {word}", "bf16", dtype, 8, 128, 128, True))
    return found


register("kv_write", Kernel(refuse=_refuse, bind=_bind, builds=_builds, verdict=invariant))
