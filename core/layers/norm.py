"""Norms, alone and joined with the reduction and the residual that come before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from core.backend.base import Kind
from core.backend.ops import Act, ReduceNormArgs, ReduceNormOp, RmsNormArgs, RmsNormOp
from core.layers.context import BuildContext
from core.layers.weights import WeightStore, load_vector

__all__ = ["ReduceNorm", "RmsNorm"]


class RmsNorm:
    """Root-mean-square norm of the last dim.

    Args:
        ctx: What it is built from.
        name: Its weight.
        dim: Size of the last dim.
        eps: Added to the mean square.
        weight_offset: Added to the weight.
    """

    weight: Tensor

    def __init__(self, ctx: BuildContext, name: str, dim: int, eps: float, *, weight_offset: float = 0.0) -> None:
        self._ctx, self._name, self._dim = ctx, name, dim
        op = RmsNormOp(dtype=ctx.dtype, determinism=ctx.determinism, dim=dim, eps=eps, weight_offset=weight_offset)
        self._norm = ctx.bind(op)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., dim], model dtype. `x` is only read."""
        out: Tensor = self._norm(RmsNormArgs(x=x, weight=self.weight))
        return out

    def load(self, store: WeightStore) -> None:
        """Reads the weight."""
        self.weight = load_vector(store, self._ctx, self._name, self._dim)


class ReduceNorm:
    """Sum over the ranks, the residual, and the norm that the next block reads.

    Args:
        ctx: What it is built from.
        name: Weight of the norm.
        dim: Width of the residual stream.
        eps: Added to the mean square.
        weight_offset: Added to the weights.
        post_name: Weight of a norm of the sum before it joins the residual; None where there is no such norm.
        input_formats: Formats of activation that the consumers ask for.
    """

    weight: Tensor

    def __init__(
        self,
        ctx: BuildContext,
        name: str,
        dim: int,
        eps: float,
        *,
        weight_offset: float = 0.0,
        post_name: str | None = None,
        input_formats: Sequence[str | None] = (),
    ) -> None:
        self._ctx, self._name, self._post_name, self._dim = ctx, name, post_name, dim
        self._post_weight: Tensor | None = None
        op = ReduceNormOp(
            dtype=ctx.dtype,
            determinism=ctx.determinism,
            features=frozenset({"post_norm"} if post_name else ()),
            dim=dim,
            eps=eps,
            weight_offset=weight_offset,
            world=ctx.parallel.world,
        )
        self._reduce_norm = ctx.bind(_with_formats(ctx, op, input_formats))

    def __call__(self, partial: Tensor, residual: Tensor) -> tuple[Act, Tensor]:
        """(normed, residual), [T, dim] each. Both arguments may be overwritten."""
        out: tuple[Act, Tensor] = self._reduce_norm(
            ReduceNormArgs(
                partial=partial,
                weight=self.weight,
                residual=residual,
                comm=self._ctx.parallel.comm,
                post_weight=self._post_weight,
            )
        )
        return out

    def load(self, store: WeightStore) -> None:
        """Reads the weights."""
        self.weight = load_vector(store, self._ctx, self._name, self._dim)
        if self._post_name is not None:
            self._post_weight = load_vector(store, self._ctx, self._post_name, self._dim)


def _with_formats(ctx: BuildContext, op: ReduceNormOp, wanted: Sequence[str | None]) -> ReduceNormOp:
    """The operation that also quantizes, where all consumers want one format and the device has a kernel for it."""
    if len(set(wanted)) != 1 or wanted[0] is None:
        return op
    fused = dataclasses.replace(op, out_formats=(wanted[0],))
    return fused if ctx.resolve(fused).kind is Kind.NATIVE else op
