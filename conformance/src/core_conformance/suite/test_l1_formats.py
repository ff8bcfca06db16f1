"""L1: activations that a norm hands to its consumers in a quantized format."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import Quantized, torch_dtype
from core.backend.ops import ReduceNormArgs, ReduceNormOp, RmsNormOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite.test_l1_dense import DTYPES, norm_of, normal

_DIM = 160
_FORMATS: dict[str, tuple[DType, tuple[int, int]]] = {
    "int8_row": (DType.INT8, (4, 1)),
    "fp8_row": (DType.FLOAT8_E4M3FN, (4, 1)),
    "fp8_block128": (DType.FLOAT8_E4M3FN, (4, 2)),
}
"""Format to the type of its elements and the shape of the scales of 4 rows."""


@check("L1/reduce_norm/format", [f"{form}-{dtype}" for form in _FORMATS for dtype in DTYPES])
def test_a_norm_in_the_format_of_its_consumer(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Elements, scales and their meaning: q times scale is the norm, to half a step of the format."""
    form, name = variant.rsplit("-", 1)
    dtype = DTYPES[name]
    op = ReduceNormOp(dtype=dtype, dim=_DIM, eps=1e-6, out_formats=(form,))
    x, residual, weight = normal(dice, dtype, 4, _DIM), normal(dice, dtype, 4, _DIM), normal(dice, dtype, _DIM)
    put = subject.put
    y, total = subject.bind(op)(ReduceNormArgs(partial=put(x), weight=put(weight), residual=put(residual)))
    if not isinstance(y, Quantized) or y.format != form:
        got = f"format {y.format!r}" if isinstance(y, Quantized) else "a plain tensor"
        raise Mismatch(f"{op.describe()}: {got} came, {form!r} was asked for")
    q, scale = subject.get(y.q), subject.get(y.scale).double()
    kind, shape = _FORMATS[form]
    if q.dtype != torch_dtype(kind) or q.shape != x.shape or tuple(scale.shape) != shape:
        got = f"q is {q.dtype} {tuple(q.shape)}, scale {tuple(scale.shape)}"
        raise Mismatch(f"{op.describe()}: {got}; expected scale {shape}")
    exact, bound = norm_of(RmsNormOp(dtype=dtype, dim=_DIM, eps=1e-6), subject.get(total), weight)
    wide = scale.repeat_interleave(128, dim=-1)[:, :_DIM] if form == "fp8_block128" else scale.expand(4, _DIM)
    step = wide * (0.5 if kind is DType.INT8 else (q.double().abs() * 2.0**-4).clamp(min=2.0**-10))
    subject.agree(op, q.double() * wide, exact, bound + 1.01 * step, "q times scale")
    _check_range(op, q)


def _check_range(op: ReduceNormOp, q: Tensor) -> None:
    """The largest element of a row uses the whole range: a scale that is too large would waste bits unseen."""
    largest = q.double().abs().amax(-1)
    limit = 127.0 if q.dtype is torch.int8 else 448.0
    if not bool((largest >= 0.96 * limit).all()):
        raise Mismatch(f"{op.describe()}: the largest element of a row is {float(largest.min())}, of {limit}")
