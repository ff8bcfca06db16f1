"""How weights and heads are divided among tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import ConfigError
from core.layers.context import ParallelContext
from core.layers.weights import WeightSlice

__all__ = ["HeadSplit", "column_slice", "row_slice", "split_evenly", "split_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """The attention heads of one rank.

    Args:
        num_heads: Query heads.
        first_head: First of them.
        num_kv_heads: Heads of key and value.
        first_kv_head: First of them; several ranks share one where there are more ranks than heads.
    """

    num_heads: int
    first_head: int
    num_kv_heads: int
    first_kv_head: int


def split_heads(num_heads: int, num_kv_heads: int, parallel: ParallelContext) -> HeadSplit:
    """This rank's heads: KV heads are split, or replicated where there are more ranks than KV heads.

    Raises:
        ConfigError: They cannot be divided evenly; the message has both numbers.
    """
    rank, world = parallel.rank, parallel.world
    heads = split_evenly(num_heads, world, "attention heads")
    if num_kv_heads >= world:
        kv_heads = split_evenly(num_kv_heads, world, "KV heads")
        return HeadSplit(num_heads=heads, first_head=rank * heads, num_kv_heads=kv_heads, first_kv_head=rank * kv_heads)
    if world % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} KV heads cannot be replicated evenly on {world} tensor-parallel ranks; "
            f"use a number of ranks that divides {num_kv_heads} or is a multiple of it"
        )
    shared = rank // (world // num_kv_heads)
    return HeadSplit(num_heads=heads, first_head=rank * heads, num_kv_heads=1, first_kv_head=shared)


def split_evenly(size: int, world: int, what: str) -> int:
    """`size` over the ranks.

    Raises:
        ConfigError: It does not divide; the message has both numbers.
    """
    if size % world:
        raise ConfigError(
            f"{size} {what} cannot be divided among {world} tensor-parallel ranks; "
            f"use a number of ranks that divides {size}"
        )
    return size // world


def column_slice(name: str, out_features: int, in_features: int, parallel: ParallelContext) -> WeightSlice:
    """This rank's share of the outputs: rows of the matrix."""
    length = split_evenly(out_features, parallel.world, f"outputs of {name}")
    rows = (parallel.rank * length, length)
    return WeightSlice(name=name, shape=(out_features, in_features), rows=rows, cols=(0, in_features))


def row_slice(name: str, out_features: int, in_features: int, parallel: ParallelContext) -> WeightSlice:
    """This rank's share of the inputs: columns of the matrix. The product is a part of a sum over the ranks."""
    length = split_evenly(in_features, parallel.world, f"inputs of {name}")
    cols = (parallel.rank * length, length)
    return WeightSlice(name=name, shape=(out_features, in_features), rows=(0, out_features), cols=cols)
