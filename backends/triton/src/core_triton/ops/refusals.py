"""What the operations here refuse alike, and Triton's words for types."""

from __future__ import annotations

from collections.abc import Collection

from core.backend import Verdict
from core.backend.ops import Determinism, OpSpec
from core.spec import DType
from core_triton.target import Target

__all__ = ["FLOATS", "invariant", "refuse_form"]

FLOATS = {DType.BFLOAT16: "bf16", DType.FLOAT16: "fp16", DType.FLOAT32: "fp32"}
"""Types of activations, and Triton's words for them."""


def refuse_form(op: OpSpec, features: Collection[str] = ()) -> str:
    """Why not that type and those features; empty where both are known.

    Args:
        features: Those that the kernel knows.
    """
    if op.dtype not in FLOATS:
        return f"no kernel in {op.dtype.value}"
    unknown = sorted(op.features.difference(features))
    return f"no kernel with {', '.join(unknown)}" if unknown else ""


def invariant(op: OpSpec, target: Target) -> Verdict:
    """NATIVE where each row's result depends on nothing else in the batch."""
    return Verdict.native(determinism=Determinism.D3)
