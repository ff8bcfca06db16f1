"""Token embedding and output head, which may be one weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from core.backend.ops import EmbedArgs, EmbedOp, LinearArgs, LinearOp, OpSpec
from core.backend.weights import Packed, Role
from core.layers.context import BuildContext
from core.layers.scheme_choice import SchemeChoice, choose_scheme
from core.layers.weights import WeightSlice, WeightStore, pack_weight
from core.spec import DType

__all__ = ["Embedding", "Head"]


class Embedding:
    """Rows of a table by token id. Every tensor-parallel rank holds the whole table.

    Args:
        ctx: What it is built from.
        name: The table.
        num_rows: Its rows, padding included.
        dim: Its columns.
        multiplier: What the rows are multiplied by, rounded to the model's dtype first.
        tied: Whether the output head reads the same weight.
    """

    weight: Packed

    def __init__(
        self, ctx: BuildContext, name: str, num_rows: int, dim: int, *, multiplier: float = 1.0, tied: bool = False
    ) -> None:
        self._ctx, self._slice = ctx, WeightSlice.whole(name, num_rows, dim)
        self._multiplier, self._tied = multiplier, tied
        self.num_rows, self.dim = num_rows, dim
        self.choice = choose_scheme(ctx, [self._slice], self._specs, quantize=False)
        self._embed = ctx.bind(self._spec(self.choice.scheme))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[T, dim], model dtype, of ids [T]."""
        out: Tensor = self._embed(EmbedArgs(token_ids=token_ids, weight=self.weight))
        return out

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How the table is kept, and why."""
        yield self.choice

    def load(self, store: WeightStore) -> None:
        """Reads and packs the table."""
        role: Role = "tied" if self._tied else "embedding"
        self.weight = pack_weight(self._ctx, store, [self._slice], self.choice.scheme, role)

    def _specs(self, scheme: str) -> Sequence[OpSpec]:
        head = head_spec(self._ctx, self.num_rows, self.dim, scheme)
        return (self._spec(scheme), head) if self._tied else (self._spec(scheme),)

    def _spec(self, scheme: str) -> EmbedOp:
        ctx = self._ctx
        return EmbedOp(
            dtype=ctx.dtype, determinism=ctx.determinism, dim=self.dim, scheme=scheme, multiplier=self._multiplier
        )


class Head:
    """Logits of hidden states. Every tensor-parallel rank computes all of them.

    Args:
        ctx: What it is built from.
        name: Its weight, read where it is not tied.
        embedding: The embedding, of whose shape the head is.
        tied: Whether it reads the embedding's weight.
        softcap: Logits become softcap * tanh(logits / softcap) where it is not 0.
    """

    def __init__(self, ctx: BuildContext, name: str, embedding: Embedding, *, tied: bool, softcap: float = 0.0) -> None:
        self._ctx, self._embedding, self._softcap = ctx, embedding, softcap
        own = WeightSlice.whole(name, embedding.num_rows, embedding.dim)
        self._slice = None if tied else own
        self._weight: Packed | None = None
        self.choice = embedding.choice if tied else choose_scheme(ctx, [own], self._specs, quantize=False)
        self._linear = ctx.bind(self._specs(self.choice.scheme)[0])

    def __call__(self, hidden: Tensor) -> Tensor:
        """[S, num_rows], float32, of hidden [S, dim]."""
        weight = self._embedding.weight if self._weight is None else self._weight
        logits: Tensor = self._linear(LinearArgs(x=hidden, weight=weight))
        if self._softcap:
            return logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How its own weight is kept; nothing where it shares the embedding's."""
        if self._slice is not None:
            yield self.choice

    def load(self, store: WeightStore) -> None:
        """Reads and packs the weight, where it has its own."""
        if self._slice is not None:
            self._weight = pack_weight(self._ctx, store, [self._slice], self.choice.scheme, "linear")

    def _specs(self, scheme: str) -> Sequence[LinearOp]:
        return (head_spec(self._ctx, self._embedding.num_rows, self._embedding.dim, scheme),)


def head_spec(ctx: BuildContext, num_rows: int, dim: int, scheme: str) -> LinearOp:
    """The product that gives logits."""
    return LinearOp(
        dtype=ctx.dtype,
        determinism=ctx.determinism,
        in_features=dim,
        out_features=num_rows,
        scheme=scheme,
        weight_dtype=ctx.dtype,
        out_dtype=DType.FLOAT32,
        quantize_activations=ctx.may_round_activations(scheme),
    )
