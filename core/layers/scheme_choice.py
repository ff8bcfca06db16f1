"""In which scheme a weight is kept: what the checkpoint has, what was asked for, and what the device can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.backend.base import Kind
from core.backend.ops import OpSpec
from core.layers.context import BuildContext
from core.layers.weights import WeightSlice, fits_scheme

__all__ = ["QUANTIZATION_SCHEMES", "SchemeChoice", "choose_scheme"]

QUANTIZATION_SCHEMES = {"int8": "int8", "fp8": "fp8_channel"}
"""Word of `--quantization` to the scheme that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeChoice:
    """A decision, for the layer and for `core doctor`.

    Args:
        names: Weights that it is about.
        stored: Scheme in the checkpoint; several are joined with "+".
        scheme: Scheme on the device.
        reason: Why they differ; empty where they do not.
    """

    names: tuple[str, ...]
    stored: str
    scheme: str
    reason: str = ""


def choose_scheme(
    ctx: BuildContext, slices: Sequence[WeightSlice], ops: Callable[[str], Sequence[OpSpec]], *, quantize: bool
) -> SchemeChoice:
    """Decides for one logical weight.

    A quantized weight stays as stored where the device has a kernel of its own for every operation on it; else it is
    dequantized once, at load. A dense weight is quantized where that was asked for: an explicit wish is never given
    up, a device that refuses it raises when the operation is bound.

    Args:
        slices: Its stored parts, one below the other.
        ops: The operations on it, for a scheme.
        quantize: Whether `ctx.quantization` is meant for it.
    """
    stored = tuple(dict.fromkeys(ctx.stored_scheme(part.name) for part in slices))
    scheme, reason = _decide(ctx, slices, stored, ops, quantize)
    names = tuple(part.name for part in slices)
    return SchemeChoice(names=names, stored="+".join(stored), scheme=scheme, reason=reason)


def _decide(
    ctx: BuildContext,
    slices: Sequence[WeightSlice],
    stored: tuple[str, ...],
    ops: Callable[[str], Sequence[OpSpec]],
    quantize: bool,
) -> tuple[str, str]:
    if ctx.quantization is not None and quantize and (ctx.dequantize or stored == ("none",)):
        return QUANTIZATION_SCHEMES[ctx.quantization], f"--quantization {ctx.quantization}"
    if stored == ("none",):
        return "none", ""
    if ctx.dequantize:
        return "none", "dequantizing at load was asked for"
    scheme = stored[0]
    if len(stored) > 1 or not fits_scheme(slices, scheme):
        return "none", "its parts do not fit into one quantized weight"
    lacking = [row for row in map(ctx.resolve, ops(scheme)) if row.kind is not Kind.NATIVE]
    if lacking:
        return "none", f"no kernel for {lacking[0].op.name} on {scheme} weights: {lacking[0].reason}"
    return scheme, ""
