"""Every tolerance of the suite, in one table. Changed only with a decision record.

In this order: probes with answers known in closed form; a bound for single reductions; a ratio for composites of
several roundings. Copies, gathers and integers are bit-exact and stand in no table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "ACCURACY_MARGIN",
    "ACCURACY_SHARE",
    "AMBIGUOUS_SHARE",
    "COMPOSITE_RATIO",
    "COPY_MODEL_GAP",
    "FUNCTION_ROUNDINGS",
    "LEAK_ALLOWANCE",
    "LENGTH_SHARE",
    "LOGIT_DELTA",
    "LOGIT_FLOOR",
    "LOG_ROUNDINGS",
    "MODEL_RATIO",
    "PERFORMANCE_FLOOR",
    "ROUNDING_SIGMAS",
    "SAMPLE_MARGIN",
    "TIE_ULPS",
    "U_ACC",
    "attention_floor",
    "pointwise_bound",
    "probe_bound",
    "recurrence_bound",
    "reduction_bound",
    "unit_roundoff",
]

U_ACC = 2.0**-24
"""Unit roundoff of the accumulator, float32."""
COMPOSITE_RATIO = 2.0
"""Attention may err this much more than a plain implementation in the same types."""
FUNCTION_ROUNDINGS = 32.0
"""Roundings in float32 that a pointwise chain with one transcendental function may add up to."""
LOG_ROUNDINGS = 64.0
"""Roundings in float32 of a log-sum-exp, and of an exponential in a softmax."""
MODEL_RATIO = 2.0
"""Logits of a model may err (root mean square) this much more than transformers in the same dtype."""
LOGIT_FLOOR = 1e-5
"""... or this share of the logits' standard deviation, which is what orders of summation alone may do in float32."""
LOGIT_DELTA = 5e-4
"""Two float32 engines may differ by this in a logit of the tiny models; a golden gap up to twice this is ambiguous."""
AMBIGUOUS_SHARE = 0.02
"""Most tokens of a comparison that may be ambiguous."""
COPY_MODEL_GAP = 4.0
"""Smallest gap, in nats, between the first and second token of the copy model: what no honest numerics can close."""
SAMPLE_MARGIN = 1e-3
"""Rows whose draw is nearer to another outcome than this are not asked for."""


TIE_ULPS = 4.0
"""An activation this many float32 roundings from the middle of two integers may be rounded to either: the scale, its
reciprocal and the quotient are rounded once each, in any order."""
ROUNDING_SIGMAS = 6.0
"""Standard deviations that many independent roundings may add up to: one result in 500 million is beyond."""

ACCURACY_SHARE = 0.99
"""Least share of the reference's accuracy that a served model must reach."""
LENGTH_SHARE = (0.9, 1.1)
"""Generated tokens of a served model as a share of the reference's."""
ACCURACY_MARGIN = 0.2
"""A document on which the reference's decision is nearer than this, in nats, counts for nobody: rounding decides it.

Transformers decides otherwise in bfloat16 than in float32 at margins of up to 0.12 (SmolLM2-135M, 120 answers)."""
PERFORMANCE_FLOOR: dict[str, dict[str, float]] = {
    "VALIDATED": {"decode": 0.05, "prefill": 0.02},
    "SIMULATED": {},
}
"""Least share of the roofline (decode: bytes/s, prefill: flop/s) by mode; what is missing is recorded, not judged."""
LEAK_ALLOWANCE: dict[str, int] = {"memory_bytes": 48 << 20, "descriptors": 4, "threads": 4, "processes": 1}
"""How much more a server may hold after a soak of any length than after its warm-up."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def reduction_bound(ref: Tensor, magnitude: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """u_out * |ref| + 4 * sqrt(K) * u_acc * sum |a||b|, element by element.

    Args:
        ref: Exact result, float64.
        magnitude: Sum of the absolute values of the products, shape of `ref`.
        length: K, the terms of the sum.
        dtype: Of the result under test.
    """
    return unit_roundoff(dtype) * ref.abs() + 4 * math.sqrt(max(length, 1)) * U_ACC * magnitude


def pointwise_bound(
    ref: Tensor, magnitude: Tensor, dtype: torch.dtype, roundings: float = FUNCTION_ROUNDINGS
) -> Tensor:
    """One rounding to `dtype`, and `roundings` in float32 of terms of size `magnitude`."""
    return (1 + 2.0**-10) * unit_roundoff(dtype) * ref.abs() + roundings * U_ACC * magnitude + torch.finfo(dtype).tiny


def probe_bound(ref: Tensor, dtype: torch.dtype) -> Tensor:
    """For probes whose answer is a ratio of small integers: probabilities rounded to `dtype`, and the result again."""
    return 3 * unit_roundoff(dtype) * ref.abs() + 16 * U_ACC


def attention_floor(logit_magnitude: float, value_magnitude: float, head_dim: int) -> float:
    """What rounding of logits in float32 alone may do: error of the exponent times the largest value."""
    return 4 * U_ACC * (math.sqrt(head_dim) * logit_magnitude + 4) * value_magnitude


def recurrence_bound(ref: Tensor, plain: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """For recurrent layers: one rounding to `dtype`, and twice what float32 costs token by token, or in another order.

    Args:
        ref: Exact result, float64.
        plain: The same in float32, token by token.
        length: Terms that went into an element: tokens times the width of the state.
        dtype: Of the result under test.
    """
    largest = float(ref.abs().max()) if ref.numel() else 0.0
    measured = float((plain.double() - ref).abs().max()) if ref.numel() else 0.0
    floor = 4 * math.sqrt(max(length, 1)) * U_ACC * max(largest, 1.0)
    return (1 + 2.0**-10) * unit_roundoff(dtype) * ref.abs() + COMPOSITE_RATIO * measured + floor
