"""Activations that a kernel rounds by itself, wrongly, and in another way that is right too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from core.backend import Kind, Verdict
from core.backend.ops import LinearOp, OpSpec
from core.backend.schemes import GGUF_BLOCKS
from core.spec import DeviceInfo, DType
from core_conformance.mutants.backend import Maker, MutantBackend
from core_conformance.mutants.variant import Honest, Mutant
from core_conformance.subject import oracle

__all__ = ["HONEST", "MUTANTS"]

_CHECK = "L1/linear/rounded-activations"

Rounding = Callable[[Tensor], Tensor]
"""Values of blocks [T, K / 32, 32], float32, that come of rounding them."""


def _scale(blocks: Tensor) -> Tensor:
    return blocks.abs().amax(-1, keepdim=True) / 127


def _by_reciprocal(blocks: Tensor) -> Tensor:
    """The scale is inverted once; halves go away from zero."""
    inverse = 127 / blocks.abs().amax(-1, keepdim=True)
    return (blocks * inverse).abs().add(0.5).floor() * blocks.sign() * _scale(blocks)


def _truncated(blocks: Tensor) -> Tensor:
    scale = _scale(blocks)
    return (blocks / scale).trunc() * scale


def _in_seven_bits(blocks: Tensor) -> Tensor:
    scale = 2 * _scale(blocks)
    return (blocks / scale).round() * scale


def _scaled_by_128(blocks: Tensor) -> Tensor:
    """The integers are those of absmax / 127, and count as those of absmax / 128."""
    scale = _scale(blocks)
    return (blocks / scale).round() * scale * (127 / 128)


def _scales_of_two_blocks_exchanged(blocks: Tensor) -> Tensor:
    scale = _scale(blocks)
    other = scale.clone()
    other[:, :2] = scale[:, :2].flip(1)
    return (blocks / scale).round() * other


def _one_scale_a_row(blocks: Tensor) -> Tensor:
    scale = _scale(blocks).amax(-2, keepdim=True)
    return (blocks / scale).round() * scale


def _rounding(rounding: Rounding) -> Maker:
    """The reference over activations that went through `rounding`, where the OpSpec allows it."""

    def make(op: Any) -> Callable[[Any], Any]:
        plain = oracle(op)
        if not _rounds(op):
            return plain
        assert op.out_dtype is DType.FLOAT32, op.describe()
        product = oracle(dataclasses.replace(op, dtype=DType.FLOAT32))

        def linear(args: Any) -> Any:
            rounded = rounding(args.x.float().unflatten(-1, (-1, 32))).flatten(-2)
            return product(dataclasses.replace(args, x=rounded))

        return linear

    return make


def _rounds(op: OpSpec) -> bool:
    return isinstance(op, LinearOp) and op.quantize_activations and op.scheme in GGUF_BLOCKS


class _Rounding(MutantBackend):
    """Declares the format where it rounds, and only there."""

    def supports(self, op: OpSpec, device: DeviceInfo) -> Verdict:
        verdict = super().supports(op, device)
        if verdict.kind is not Kind.NATIVE or not self._declares(op):
            return verdict
        return dataclasses.replace(verdict, activation_format="int8_block32")

    def _declares(self, op: OpSpec) -> bool:
        return _rounds(op)


class ByReciprocal(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_by_reciprocal)}


class Truncated(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_truncated)}


class InSevenBits(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_in_seven_bits)}


class ScaledBy128(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_scaled_by_128)}


class ScalesExchanged(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_scales_of_two_blocks_exchanged)}


class OneScaleARow(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_one_scale_a_row)}


class Undeclared(MutantBackend):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_by_reciprocal)}


class DeclaredEverywhere(_Rounding):
    makers: ClassVar[Mapping[str, Maker]] = {"linear": _rounding(_by_reciprocal)}

    def _declares(self, op: OpSpec) -> bool:
        return isinstance(op, LinearOp) and op.scheme in GGUF_BLOCKS


def _mutant(name: str, backend: type[MutantBackend]) -> Mutant:
    return Mutant(name=name, level="L1", first=_CHECK, also=(_CHECK,), backend=backend)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("rounded activations cut off", Truncated),
    _mutant("rounded activations with half of the range", InSevenBits),
    _mutant("rounded activations scaled by 128", ScaledBy128),
    _mutant("two blocks' activation scales exchanged", ScalesExchanged),
    _mutant("one activation scale for a row of blocks", OneScaleARow),
    _mutant("activations rounded and not declared", Undeclared),
    _mutant("rounding declared where nobody allowed it", DeclaredEverywhere),
)

HONEST: tuple[Honest, ...] = (
    Honest(name="activations rounded by a reciprocal", backend=ByReciprocal, heads=("L1/linear",)),
)
