"""From a model's layers to cache groups that share one pool of equal-sized blocks.

A block is a stack of slabs, one slab for each layer of a group. Every group has the same number of slabs, so that any
block can serve any group, and a block id belongs to one group at a time. A model whose layers are all alike is one
group. Layers of several kinds are cut into groups of equal size: 3 full and 15 sliding layers become one full group
and five sliding groups of 3 slabs each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import UnsupportedError
from core.spec import CacheKind, KVCacheSpec

__all__ = ["KVCacheGroup", "KVCacheGroups"]

_GROUP_COST = 0.5
"""What one more group costs (a block table, a plan a step), in slabs of padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share a block table.

    Args:
        spec: What each of the layers keeps.
        layers: Layer indices; the position in the tuple is the slab.
    """

    spec: KVCacheSpec
    layers: tuple[int, ...]

    @property
    def window(self) -> int:
        """Tokens that a query may see, itself included; 0 means all."""
        return self.spec.window if self.spec.kind is CacheKind.SLIDING else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroups:
    """Cache groups of a model.

    Args:
        groups: In the order in which block tables are listed everywhere.
        num_slabs: Layers that a block has room for; a group of fewer layers leaves the rest unused.
        layer_slabs: For each layer of the model (group index, slab index), or None for a layer without a cache.
    """

    groups: tuple[KVCacheGroup, ...]
    num_slabs: int
    layer_slabs: tuple[tuple[int, int] | None, ...]

    @classmethod
    def from_layers(cls, layers: Sequence[KVCacheSpec | None]) -> KVCacheGroups:
        """Groups the layers of a model, as `ModelSpec.layers` lists them.

        Raises:
            UnsupportedError: where a layer keeps recurrent state, which is not kept in blocks of tokens.
        """
        kinds: dict[KVCacheSpec, list[int]] = {}
        for index, spec in enumerate(layers):
            if spec is not None:
                _check_kind(spec)
                kinds.setdefault(spec, []).append(index)
        num_slabs = _choose_num_slabs([len(members) for members in kinds.values()])
        groups = tuple(
            KVCacheGroup(spec=spec, layers=tuple(members[start : start + num_slabs]))
            for spec, members in kinds.items()
            for start in range(0, len(members), num_slabs)
        )
        return cls(groups=groups, num_slabs=num_slabs, layer_slabs=_layer_slabs(groups, len(layers)))

    @property
    def slab_token_bytes(self) -> int:
        """Bytes of a token in one slab in the canonical layout: what the widest layer needs."""
        return max((group.spec.token_bytes for group in self.groups), default=0)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens over all its slabs, in the canonical layout."""
        return self.num_slabs * self.slab_token_bytes * block_size


def _check_kind(spec: KVCacheSpec) -> None:
    if spec.kind is CacheKind.STATE:
        raise UnsupportedError(
            "kv_cache", f"a layer asks for a cache of kind {spec.kind.value!r}, which no cache group serves yet",
            "choose a model with attention layers only",
        )  # fmt: skip


def _choose_num_slabs(counts: Sequence[int]) -> int:
    """The group size with the least padding, where each group counts as some padding too; the larger one on a tie."""

    def cost(size: int) -> float:
        num_groups = sum(-(-count // size) for count in counts)
        return num_groups * size - sum(counts) + num_groups * _GROUP_COST

    return min(range(max(counts, default=1), 0, -1), key=cost)


def _layer_slabs(groups: Sequence[KVCacheGroup], num_layers: int) -> tuple[tuple[int, int] | None, ...]:
    slabs: list[tuple[int, int] | None] = [None] * num_layers
    for group_index, group in enumerate(groups):
        for slab, layer in enumerate(group.layers):
            slabs[layer] = (group_index, slab)
    return tuple(slabs)
