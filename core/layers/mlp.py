"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from core.backend.ops import Act, Activation, ActMulArgs, ActMulOp
from core.layers.context import BuildContext
from core.layers.linear import Linear
from core.layers.parallel import column_slice, row_slice
from core.layers.scheme_choice import SchemeChoice
from core.layers.weights import WeightStore

__all__ = ["GatedMlp"]


class GatedMlp:
    """down(activation(gate(x)) * up(x)), this rank's part of it.

    Gate and up are one product; where they are stored in different schemes both are dequantized at load.

    Args:
        ctx: What it is built from.
        prefix: Names of the weights up to "gate_proj.weight".
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside, before it is divided among ranks.
        activation: Of the gate.
        bias: Whether the products have biases.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool = False,
    ) -> None:
        gate, up = (
            column_slice(f"{prefix}{name}.weight", intermediate_size, hidden_size, ctx.parallel)
            for name in ("gate_proj", "up_proj")
        )
        self._gate_up = Linear(ctx, [gate, up], bias=bias)
        op = ActMulOp(dtype=ctx.dtype, determinism=ctx.determinism, size=gate.rows[1], activation=activation)
        self._act_mul = ctx.bind(op)
        down = row_slice(f"{prefix}down_proj.weight", hidden_size, intermediate_size, ctx.parallel)
        self._down = Linear(ctx, [down], bias=bias and ctx.parallel.rank == 0)

    @property
    def input_formats(self) -> tuple[str | None, ...]:
        """Formats that the first product asks for."""
        return (self._gate_up.input_format,)

    def __call__(self, x: Act) -> Tensor:
        """[T, hidden_size]: a part of a sum over the ranks."""
        return self._down(self._act_mul(ActMulArgs(x=self._gate_up(x))))

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How its weights are kept, and why."""
        yield from (self._gate_up.choice, self._down.choice)

    def load(self, store: WeightStore) -> None:
        """Reads and packs the weights."""
        self._gate_up.load(store)
        self._down.load(store)
