"""Matrix products with stored weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend.base import Kind
from core.backend.ops import Act, LinearArgs, LinearOp
from core.backend.weights import Packed
from core.layers.context import BuildContext
from core.layers.parallel import HeadSplit
from core.layers.scheme_choice import SchemeChoice, choose_scheme
from core.layers.weights import WeightSlice, WeightStore, fits_scheme, load_vector, pack_weight
from core.spec import DType

__all__ = ["Linear", "QkvLinear", "QkvNames"]


class Linear:
    """x @ weight.T (+ bias) with one packed weight, of one stored matrix or of several, one below the other.

    Args:
        ctx: What it is built from.
        slices: Parts of the weight, from the top; equal columns.
        bias: Whether each slice has a bias of its rows, stored beside it.
        out_dtype: Type of the result; None is the model's.
        quantize: Whether `--quantization` is meant for it.
    """

    weight: Packed

    def __init__(
        self,
        ctx: BuildContext,
        slices: Sequence[WeightSlice],
        *,
        bias: bool = False,
        out_dtype: DType | None = None,
        quantize: bool = True,
    ) -> None:
        self._ctx = ctx
        self._slices = tuple(slices)
        self._has_bias = bias
        self._out_dtype = out_dtype or ctx.dtype
        self.choice = choose_scheme(ctx, slices, lambda scheme: [self._spec(scheme)], quantize=quantize)
        op = self._spec(self.choice.scheme)
        self.input_format = _input_format(ctx, op)
        self._linear = ctx.bind(op)
        self._bias: Tensor | None = None

    def __call__(self, x: Act) -> Tensor:
        """[T, out_features] of x [T, in_features]."""
        out: Tensor = self._linear(LinearArgs(x=x, weight=self.weight, bias=self._bias))
        return out

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How its weight is kept, and why."""
        yield self.choice

    def load(self, store: WeightStore) -> None:
        """Reads and packs the weight; peak of one weight."""
        self.weight = pack_weight(self._ctx, store, self._slices, self.choice.scheme, "linear")
        if self._has_bias:
            self._bias = torch.cat([self._load_bias(store, part) for part in self._slices])

    def _load_bias(self, store: WeightStore, part: WeightSlice) -> Tensor:
        return load_vector(store, self._ctx, part.bias_name, part.shape[0], part.rows)

    def _spec(self, scheme: str) -> LinearOp:
        return LinearOp(
            dtype=self._ctx.dtype,
            determinism=self._ctx.determinism,
            features=frozenset({"bias"} if self._has_bias else ()),
            in_features=self._slices[0].cols[1],
            out_features=sum(part.rows[1] for part in self._slices),
            scheme=scheme,
            weight_dtype=self._ctx.dtype,
            out_dtype=self._out_dtype,
            quantize_activations=self._ctx.may_round_activations(scheme),
        )


def _input_format(ctx: BuildContext, op: LinearOp) -> str | None:
    """Format of activation that the device's kernel asks for; composites take plain tensors."""
    row = ctx.resolve(op)
    return row.verdict.input_format if row.kind is Kind.NATIVE else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QkvNames:
    """Names of the three matrices, and their sizes before they are divided among ranks."""

    query: str
    key: str
    value: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int

    def slices(self, split: HeadSplit) -> tuple[WeightSlice, WeightSlice, WeightSlice]:
        """This rank's rows of the three."""
        kv = (split.first_kv_head, split.num_kv_heads, self.num_kv_heads)
        return (
            self._heads(self.query, split.first_head, split.num_heads, self.num_heads),
            self._heads(self.key, *kv),
            self._heads(self.value, *kv),
        )

    def _heads(self, name: str, first: int, count: int, total: int) -> WeightSlice:
        rows = (first * self.head_dim, count * self.head_dim)
        shape = (total * self.head_dim, self.hidden_size)
        return WeightSlice(name=name, shape=shape, rows=rows, cols=(0, self.hidden_size))


class QkvLinear:
    """Queries, keys and values of a step: one product where the three are stored in one scheme, else three.

    Args:
        ctx: What it is built from.
        names: The three matrices.
        split: This rank's heads.
        bias: Whether they have biases.
    """

    def __init__(self, ctx: BuildContext, names: QkvNames, split: HeadSplit, *, bias: bool) -> None:
        slices = names.slices(split)
        self._heads = (split.num_heads, split.num_kv_heads, split.num_kv_heads)
        self._head_dim = names.head_dim
        stored = {ctx.stored_scheme(part.name) for part in slices}
        one = len(stored) == 1 and fits_scheme(slices, next(iter(stored)))
        groups = [slices] if one else [(part,) for part in slices]
        self._parts = [Linear(ctx, group, bias=bias) for group in groups]

    @property
    def input_formats(self) -> tuple[str | None, ...]:
        """Formats that the products ask for."""
        return tuple(part.input_format for part in self._parts)

    def __call__(self, x: Act) -> tuple[Tensor, Tensor, Tensor]:
        """Query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim]; may be views of one tensor."""
        if len(self._parts) == 1:
            sizes = [count * self._head_dim for count in self._heads]
            flat = self._parts[0](x).split(sizes, dim=1)
        else:
            flat = tuple(part(x) for part in self._parts)
        query, key, value = (
            part.view(part.shape[0], count, self._head_dim) for part, count in zip(flat, self._heads, strict=True)
        )
        return query, key, value

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How its weights are kept, and why."""
        for part in self._parts:
            yield part.choice

    def load(self, store: WeightStore) -> None:
        """Reads and packs the weights."""
        for part in self._parts:
            part.load(store)
