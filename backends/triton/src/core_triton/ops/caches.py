"""What the operations over caches have alike: Triton's words for cache types, and how keys are cut into parts."""

from __future__ import annotations

from core.backend import Plan
from core.backend.ops import LayerCache
from core.spec import DType
from core_triton.target import Target
from core_triton.tuning import Tuning

__all__ = ["CACHE_WORDS", "LIMITS", "cache_words", "num_parts", "page_of", "refuse_cache"]

CACHE_WORDS = {
    DType.BFLOAT16: "bf16",
    DType.FLOAT16: "fp16",
    DType.FLOAT32: "fp32",
    DType.INT8: "i8",
    DType.FLOAT8_E5M2: "fp8e5",
    DType.FLOAT8_E4M3FN: "fp8e4nv",
    DType.FLOAT8_E4M3FNUZ: "fp8e4b8",
}
"""Triton's words for what a cache may hold."""

LIMITS = {
    DType.INT8: (-128.0, 127.0),
    DType.FLOAT8_E5M2: (-57344.0, 57344.0),
    DType.FLOAT8_E4M3FN: (-448.0, 448.0),
    DType.FLOAT8_E4M3FNUZ: (-240.0, 240.0),
}
"""Smallest and largest number of the types that saturate."""


def refuse_cache(kv_dtype: DType, target: Target) -> str:
    """Why a cache of that type cannot be read and written; empty where it can."""
    if kv_dtype not in CACHE_WORDS:
        return f"no kernel over a cache of {kv_dtype.value}"
    lacks_e4m3 = target.family == "cuda" and not target.fp8
    if kv_dtype is DType.FLOAT8_E4M3FN and lacks_e4m3:
        return f"{target.arch} has no float8_e4m3fn"
    if kv_dtype is DType.FLOAT8_E4M3FNUZ and target.family == "cuda":
        return f"{target.arch} has no float8_e4m3fnuz"
    return ""


def cache_words(target: Target) -> dict[DType, str]:
    """The 8-bit types that a cache may hold on the target."""
    return {dtype: word for dtype, word in CACHE_WORDS.items() if dtype in LIMITS and not refuse_cache(dtype, target)}


def page_of(cache: LayerCache | None) -> int:
    """Tokens a block; 0 without a cache."""
    return 0 if cache is None else int(cache[0].shape[1])


def num_parts(tuning: Tuning, plan: Plan, programs: int, page: int, *, fixed: bool = False) -> int:
    """Into how many parts the keys of each request are cut. Known before any length is: replays must fit too.

    Args:
        programs: Programs of the launch without a cut.
        fixed: Whether the number may depend on nothing in the batch.
    """
    if "max_parts" not in tuning.sizes or not page:
        return 1
    if fixed:
        return min(4, tuning["max_parts"])
    most_keys = plan.block_table.shape[1] * page
    wanted = min(tuning["programs"] // max(programs, 1), most_keys // tuning["part_keys"], tuning["max_parts"])
    return max(1, wanted)
