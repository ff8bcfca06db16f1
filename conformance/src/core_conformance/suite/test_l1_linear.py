"""L1: `linear` for dense weights and for every scheme in which weights are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from core.backend import Packed, Quantized, torch_dtype
from core.backend.ops import EmbedArgs, EmbedOp, LinearArgs, LinearOp
from core.backend.schemes import (
    GGUF_BLOCKS,
    INT4_GROUPS,
    SCHEMES,
    dense_rows,
    int8_row,
    quantize_fp8_block,
    quantize_fp8_channel,
    quantize_fp8_tensor,
    quantize_int4_group,
    quantize_int8,
    quantize_rows,
)
from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import Suspects
from core_conformance.operations.cache_memory import int32
from core_conformance.subject import Mismatch, Subject
from core_conformance.tolerance import TIE_ULPS, U_ACC, reduction_bound, unit_roundoff

_HALVES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "fp32": DType.FLOAT32}
_SHAPES = ((1, 64, 48), (3, 71, 33), (17, 256, 130), (2, 1024, 8), (0, 64, 48))
"""(tokens, in_features, out_features): single rows, odd tails, more rows than a tile, a long sum, no token."""
_QUANTIZERS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "int8": quantize_int8,
    "fp8_tensor": quantize_fp8_tensor,
    "fp8_channel": quantize_fp8_channel,
    "fp8_block": quantize_fp8_block,
    "int4_group": quantize_int4_group,
}
SCHEME_NAMES = (*_QUANTIZERS, *GGUF_BLOCKS)


def _linear_op(
    dtype: DType, k: int, n: int, out: DType | None = None, *features: str, scheme: str = "none"
) -> LinearOp:
    return LinearOp(
        dtype=dtype,
        in_features=k,
        out_features=n,
        scheme=scheme,
        weight_dtype=dtype,
        out_dtype=out or dtype,
        features=frozenset(features),
    )


@check("L1/linear/dense", _HALVES)
def test_dense_products(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Several shapes against the bound of one reduction."""
    for tokens, k, n in _SHAPES:
        _check_dense(subject, dice, _linear_op(variant, k, n), tokens)


@check("L1/linear/bias", _HALVES)
def test_dense_products_with_bias(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """The bias is added before the only rounding."""
    for tokens, k, n in _SHAPES[:3]:
        _check_dense(subject, dice, _linear_op(variant, k, n, None, "bias"), tokens)


@check("L1/linear/float32-out", {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16})
def test_the_head_gives_float32(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Logits in float32 from half-precision weights, with no rounding to half precision between."""
    for tokens, k, n in ((1, 64, 264), (4, 128, 99)):
        _check_dense(subject, dice, _linear_op(variant, k, n, DType.FLOAT32), tokens)


@check("L1/linear/strided", _HALVES)
def test_inputs_are_read_by_their_row_stride(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """x is a slice of a wider tensor; what lies beside it is NaN."""
    op, dtype = _linear_op(variant, 64, 40), torch_dtype(variant)
    x, weight = (torch.randn(n, 64, generator=dice).to(dtype) for n in (5, 40))
    wide = torch.full((5, 96), float("nan"), dtype=dtype)
    wide[:, :64] = x
    packed = subject.pack({"weight": weight}, "none", (40, 64), variant)
    out = subject.bind(op)(LinearArgs(x=subject.put(wide)[:, :64], weight=packed))
    _compare(subject, op, out, x, weight, None)


@check("L1/linear/tail", _HALVES)
def test_every_column_of_the_sum_counts(subject: Subject, variant: DType) -> None:
    """x is one-hot: the product is a column of the weight, bit by bit, for every k of odd lengths."""
    for k in (1, 31, 33, 71):
        op, dtype = _linear_op(variant, k, 9), torch_dtype(variant)
        weight = torch.arange(1, 9 * k + 1).remainder(97).sub(48).view(9, k).to(dtype)
        packed = subject.pack({"weight": weight}, "none", (9, k), variant)
        out = subject.bind(op)(LinearArgs(x=subject.put(torch.eye(k, dtype=dtype)), weight=packed))
        suspects = product_suspects(torch.eye(k, dtype=torch.float64), weight.double())
        subject.equal(op, out + 0.0, weight.T.contiguous() + 0.0, suspects=suspects)


@check("L1/linear/update", _HALVES)
def test_a_weight_that_was_updated_is_the_one_that_counts(
    subject: Subject, dice: torch.Generator, variant: DType
) -> None:
    """After update_ with another weight's tensors the product is the other weight's."""
    op, dtype = _linear_op(variant, 64, 24), torch_dtype(variant)
    x, one, two = (torch.randn(n, 64, generator=dice).to(dtype) for n in (3, 24, 24))
    packed, other = (subject.pack({"weight": weight}, "none", (24, 64), variant) for weight in (one, two))
    linear, there = subject.bind(op), subject.put(x)
    _compare(subject, op, linear(LinearArgs(x=there, weight=packed)), x, one, None)
    packed.update_({name: part.clone() for name, part in other.tensors().items()})
    _compare(subject, op, linear(LinearArgs(x=there, weight=packed)), x, two, None)


@check("L1/linear/scheme", [f"{scheme}-{dtype}" for scheme in SCHEME_NAMES for dtype in ("bf16", "fp32")])
def test_quantized_weights(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """The product with the dequantized weight, however it is stored; int8 quantizes its activations row by row."""
    scheme, name = variant.rsplit("-", 1)
    for tokens, k, n in ((1, 256, 48), (5, 512, 131)):
        op = _linear_op(_HALVES[name], k, n, scheme=scheme)
        linear = subject.bind(op)
        parts = stored_weight(scheme, n, k, dice)
        packed = subject.pack(parts, scheme, (n, k), op.dtype)
        x = torch.randn(tokens, k, generator=dice).to(torch_dtype(op.dtype))
        act = x if packed.input_format is None else quantize_rows(x, packed.input_format)
        out = linear(LinearArgs(x=put_act(subject, act), weight=packed))
        if scheme == "int8":
            _compare_int8(subject, op, out, x, parts)
        else:
            _compare(subject, op, out, plain_act(act), SCHEMES[scheme].dequantize(parts), None)


@check("L1/linear/int8-exact", _HALVES)
def test_int8_products_are_exact(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Activations that are whole multiples of their row's scale: whoever quantizes them gets the same integers."""
    tokens, k, n = 4, 300, 33
    op = _linear_op(variant, k, n, scheme="int8")
    linear = subject.bind(op)
    whole = torch.randint(-127, 128, (tokens, k), generator=dice)
    whole[:, 0] = 127
    x = (whole * 2.0 ** torch.arange(-3, tokens - 3)[:, None]).to(torch_dtype(variant))
    parts = stored_weight("int8", n, k, dice)
    packed = subject.pack(parts, "int8", (n, k), variant)
    act = x if packed.input_format is None else quantize_rows(x, packed.input_format)
    out = linear(LinearArgs(x=put_act(subject, act), weight=packed))
    weight = parts["weight"].double() * parts["scale"].double()
    exact = x.double() @ weight.T
    bound = unit_roundoff(torch_dtype(variant)) * exact.abs() + 8 * U_ACC * exact.abs()
    subject.agree(op, out, exact, bound, "(whole activations) result", suspects=product_suspects(x.double(), weight))


@check("L1/linear/rounded-activations", [f"{scheme}-bf16" for scheme in ("int8", *GGUF_BLOCKS)])
def test_rounded_activations_are_those_that_the_verdict_declares(
    subject: Subject, dice: torch.Generator, variant: str
) -> None:
    """Where activations may be rounded: the product of those that the declared format gives, or of the plain ones."""
    scheme = variant.rsplit("-", 1)[0]
    for tokens, k, n in ((1, 256, 48), (5, 768, 131), (33, 512, 20)):
        plain = _linear_op(DType.BFLOAT16, k, n, DType.FLOAT32, scheme=scheme)
        op = dataclasses.replace(plain, quantize_activations=True)
        form = subject.backend.supports(op, subject.target.device).activation_format
        unasked = subject.backend.supports(plain, subject.target.device).activation_format
        if unasked is not None:
            raise Mismatch(f"{plain.describe()}: activations are rounded to {unasked}, which nobody allowed")
        parts = stored_weight(scheme, n, k, dice)
        packed = subject.pack(parts, scheme, (n, k), op.dtype)
        x = torch.randn(tokens, k, generator=dice).bfloat16()
        act = x if packed.input_format is None else quantize_rows(x, packed.input_format)
        out = subject.bind(op)(LinearArgs(x=put_act(subject, act), weight=packed))
        weight = SCHEMES[scheme].dequantize(parts)
        if form is not None and subject.is_native(op):
            _compare_rounded(subject, op, out, x, form, weight)
        elif scheme == "int8":
            _compare_int8(subject, op, out, x, parts)
        else:
            _compare(subject, op, out, plain_act(act), weight, None)


@check("L1/linear/int4-groups", [f"{group}-{dtype}" for group in INT4_GROUPS for dtype in _HALVES])
def test_groups_of_every_size(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Every group has its own scale and zero, of very different sizes; scales in the model's type."""
    group, dtype = int(variant.split("-")[0]), _HALVES[variant.split("-")[1]]
    op = _linear_op(dtype, 384, 40, scheme="int4_group")
    linear = subject.bind(op)
    spread = 2.0 ** torch.randint(-3, 4, (40, 384 // group), generator=dice).repeat_interleave(group, dim=1)
    dense = (torch.randn(40, 384, generator=dice) + torch.rand(40, 1, generator=dice)) * spread
    weight, scale, zero = quantize_int4_group(dense, group)
    parts = {"weight": weight, "scale": scale.to(torch_dtype(dtype)), "zero": zero}
    packed = subject.pack(parts, "int4_group", (40, 384), dtype)
    x = torch.randn(3, 384, generator=dice).to(torch_dtype(dtype))
    _compare(
        subject,
        op,
        linear(LinearArgs(x=subject.put(x), weight=packed)),
        x,
        SCHEMES["int4_group"].dequantize(parts),
        None,
    )


@check("L1/embed/scheme", [f"{scheme}-{dtype}" for scheme in SCHEME_NAMES for dtype in ("bf16", "fp32")])
def test_quantized_embeddings(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Gathered rows are dequantized and rounded once."""
    scheme, name = variant.rsplit("-", 1)
    op = EmbedOp(dtype=_HALVES[name], dim=256, scheme=scheme)
    embed, ids = subject.bind(op), [0, 39, 7, 7]
    parts = stored_weight(scheme, 40, 256, dice)
    packed = subject.pack(parts, scheme, (40, 256), op.dtype, role="embedding")
    out = embed(EmbedArgs(token_ids=subject.put(int32(ids)), weight=packed))
    host = Packed(shape=(40, 256), scheme=scheme, tensors=parts)
    exact = dense_rows(host, int32(ids)).double()
    subject.agree(op, out, exact, (1 + 2.0**-10) * unit_roundoff(torch_dtype(op.dtype)) * exact.abs() + 1e-30)


def stored_weight(scheme: str, rows: int, columns: int, dice: torch.Generator) -> dict[str, Tensor]:
    """Parts of a weight of that scheme: quantized normal numbers, or random GGUF blocks with tame scales."""
    if scheme in _QUANTIZERS:
        parts = _QUANTIZERS[scheme](torch.randn(rows, columns, generator=dice))
        return dict(zip(SCHEMES[scheme].parts, parts, strict=True))
    elements, num_bytes, _ = GGUF_BLOCKS[scheme]
    blocks = torch.randint(0, 256, (rows, columns // elements, num_bytes), generator=dice, dtype=torch.uint8)
    for at in _half_places(scheme):
        scales = torch.rand(rows, columns // elements, 1, generator=dice).mul(0.05).add(0.001).to(torch.float16)
        blocks[..., at : at + 2] = scales.view(torch.uint8)
    return {"weight": blocks.flatten(1)}


def _half_places(scheme: str) -> tuple[int, ...]:
    """Where the half-precision numbers of a block stand."""
    if scheme == "q6_k":
        return (208,)
    return (0, 2) if scheme in ("q4_1", "q5_1", "q4_k", "q5_k") else (0,)


def put_act(subject: Subject, act: Tensor | Quantized) -> Tensor | Quantized:
    if isinstance(act, Tensor):
        return subject.put(act)
    return Quantized(q=subject.put(act.q), scale=subject.put(act.scale), format=act.format)


def plain_act(act: Tensor | Quantized) -> Tensor:
    """The values that an activation stands for: float64 where it is quantized."""
    if isinstance(act, Tensor):
        return act
    scale = act.scale.double()
    block = {"fp8_block128": 128, "int8_block32": 32}.get(act.format)
    if block is not None:
        scale = scale.repeat_interleave(block, dim=-1)[:, : act.q.shape[-1]]
    return act.q.double() * scale


def _check_dense(subject: Subject, dice: torch.Generator, op: LinearOp, tokens: int) -> None:
    dtype = torch_dtype(op.dtype)
    x = torch.randn(tokens, op.in_features, generator=dice).to(dtype)
    weight = torch.randn(op.out_features, op.in_features, generator=dice).to(dtype)
    bias = torch.randn(op.out_features, generator=dice).to(dtype) if op.has("bias") else None
    packed = subject.pack({"weight": weight}, "none", weight.shape, op.dtype)
    there = None if bias is None else subject.put(bias)
    out = subject.bind(op)(LinearArgs(x=subject.put(x), weight=packed, bias=there))
    _compare(subject, op, out, x, weight, bias)


def _compare(subject: Subject, op: LinearOp, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    a, b = x.double(), weight.double()
    exact, magnitude = a @ b.T, a.abs() @ b.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    dtype = torch_dtype(op.out_dtype)
    bound = reduction_bound(exact, magnitude, op.in_features, dtype) + torch.finfo(dtype).tiny
    subject.agree(op, out, exact, bound, suspects=product_suspects(a, b, bias))


def product_suspects(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Suspects:
    """What the usual bugs of a product answer: sums that end early, and a bias that is not there or there twice."""

    def suspects(got: Tensor) -> dict[str, Tensor]:
        added = torch.zeros(len(b), dtype=torch.float64) if bias is None else bias.double()
        width = a.shape[1]
        found: dict[str, Tensor] = {}
        for tile in (8, 16, 32, 64, 128):
            whole = width // tile * tile
            if 0 < whole < width:
                name = f"tile tail: it is the sum over the first {whole} of {width} columns"
                found.setdefault(name, a[:, :whole] @ b[:, :whole].T + added)
        if bias is not None:
            found["bias: it is left out"] = a @ b.T
            found["bias: it is added twice"] = a @ b.T + 2 * added
        return found

    return suspects


def _compare_int8(subject: Subject, op: LinearOp, out: Tensor, x: Tensor, parts: dict[str, Tensor]) -> None:
    """Exact between integers; one activation next to a rounding boundary may fall to the other side."""
    rows = int8_row(x)
    scales = rows.scale.double() * parts["scale"].double().view(1, -1)
    exact = (rows.q.double() @ parts["weight"].double().T) * scales
    flip = scales * parts["weight"].double().abs().amax(-1)
    bound = unit_roundoff(torch_dtype(op.out_dtype)) * exact.abs() + 8 * U_ACC * exact.abs() + flip
    subject.agree(op, out, exact, bound)


def _compare_rounded(subject: Subject, op: LinearOp, out: Tensor, x: Tensor, form: str, weight: Tensor) -> None:
    """One reduction over rounded activations; those that lie on a rounding boundary may fall to its other side."""
    rows = quantize_rows(x, form)
    a, b = plain_act(rows), weight.double()
    exact, magnitude = a @ b.T, a.abs() @ b.abs().T
    flips = _either_side(x, form).double() * plain_act(dataclasses.replace(rows, q=torch.ones_like(rows.q)))
    bound = reduction_bound(exact, magnitude, op.in_features, torch_dtype(op.out_dtype)) + flips @ b.abs().T
    subject.agree(op, out, exact, bound)


def _either_side(x: Tensor, form: str) -> Tensor:
    """Which activations [T, K] of an int8 format lie so near the middle of two integers that either is right.

    The middle is decided exactly, from the absmax that is the scale times 127; TIE_ULPS roundings of the scale, its
    reciprocal and the quotient may move a value across.
    """
    assert form in ("int8_row", "int8_block32"), f"no rule of ties for {form!r}"
    groups = x.double().unflatten(-1, (-1, 32)) if form == "int8_block32" else x.double().unsqueeze(-2)
    exact = groups * 127 / groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    distance = (exact.abs() - exact.abs().floor() - 0.5).abs()
    return (distance <= TIE_ULPS * U_ACC * exact.abs()).flatten(-2)
