"""How many KV blocks a device gets, and the memory for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from core.backend import Backend, GroupSpec, KVLayout, KVSlab
from core.backend.ops import LayerCache, OpSpec
from core.config import CacheConfig, EngineConfig
from core.errors import ConfigError, UnsupportedError
from core.kv.groups import KVCacheGroups
from core.spec import ModelSpec

__all__ = ["KVPool", "choose_block_size", "make_kv_pool"]

_HOST_SHARE = 0.5
"""Share of free memory that the pool may take where the device has no memory of its own: others live there too."""
_HOST_LIMIT = 4 * 2**30
"""Most bytes that the pool takes there unless it is told otherwise: more helps only long-lived prefix caches."""


@dataclass(kw_only=True)
class KVPool:
    """The memory of the KV cache: one slab for each layer of a group, on the device and, for swapping, on the host.

    Args:
        groups: Cache groups; blocks of a slab serve each of them.
        group_specs: What the plan of each group must serve.
        slabs: Device memory.
        host_slabs: Host memory of equal layout; empty where nothing is swapped.
    """

    groups: KVCacheGroups
    group_specs: tuple[GroupSpec, ...]
    slabs: list[KVSlab]
    host_slabs: list[KVSlab] = field(default_factory=list)

    def layer_caches(self) -> list[LayerCache | None]:
        """The planes of each layer; None for a layer without a cache."""
        views = [slab.views() for slab in self.slabs]
        return [None if place is None else views[place[1]] for place in self.groups.layer_slabs]


def choose_block_size(cache: CacheConfig, backend: Backend) -> int:
    """Tokens a block: the operator's, where the device can take it, else the one that the device prefers.

    Raises:
        ConfigError: the device cannot take the operator's.
    """
    sizes = backend.capabilities.block_sizes
    if cache.block_size is None:
        return sizes[0]
    if cache.block_size not in sizes:
        raise ConfigError(
            f"--block-size {cache.block_size} does not fit the device; it takes {', '.join(map(str, sizes))}"
        )
    return cache.block_size


def make_kv_pool(
    config: EngineConfig, backend: Backend, spec: ModelSpec, block_size: int, ops: Sequence[Sequence[OpSpec]]
) -> KVPool:
    """Memory for the KV cache of a model that is loaded already.

    Args:
        ops: The operations of each layer that use its plan; empty for a layer without a cache.

    Raises:
        ConfigError: the memory does not hold a single useful pool.
        UnsupportedError: layers need layouts that cannot share a pool.
    """
    groups = KVCacheGroups.from_layers(spec.layers)
    layout = _common_layout(groups, backend, block_size)
    block_bytes = layout.block_bytes * groups.num_slabs
    num_blocks = _num_blocks(config, backend, spec, groups, block_size, block_bytes)
    slabs = _slabs(backend, layout, groups.num_slabs, num_blocks)
    num_host = config.cache.swap_space_bytes // block_bytes if backend.capabilities.swap else 0
    host = [_host_slab(layout, num_host) for _ in range(groups.num_slabs)] if num_host else []
    group_specs = tuple(
        GroupSpec(index=index, layout=layout, ops=_group_ops(group.layers, ops))
        for index, group in enumerate(groups.groups)
    )
    return KVPool(groups=groups, group_specs=group_specs, slabs=slabs, host_slabs=host)


def _common_layout(groups: KVCacheGroups, backend: Backend, block_size: int) -> KVLayout:
    layouts = {layout.id: layout for group in groups.groups for layout in [backend.kv_layout(group.spec, block_size)]}
    if len(layouts) != 1:
        raise UnsupportedError(
            "kv_cache",
            f"its layers need different block layouts ({', '.join(sorted(layouts))}), which cannot share a pool",
        )
    return next(iter(layouts.values()))


def _num_blocks(
    config: EngineConfig, backend: Backend, spec: ModelSpec, groups: KVCacheGroups, block_size: int, block_bytes: int
) -> int:
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_cache_memory_bytes is not None:
        return _at_least_two(cache.kv_cache_memory_bytes, block_bytes, "--kv-cache-memory-bytes")
    longest = min(spec.max_model_len, config.max_model_len or spec.max_model_len)
    useful = config.scheduler.max_num_seqs * len(groups.groups) * -(-longest // block_size) + 1
    budget = _budget(cache, backend)
    return min(useful, _at_least_two(budget, block_bytes, "--gpu-memory-utilization"))


def _budget(cache: CacheConfig, backend: Backend) -> int:
    memory = backend.memory()
    allowed = int(memory.total * cache.device_memory_utilization) - (memory.total - memory.free)
    if backend.capabilities.unified_memory:
        return min(allowed, int(memory.free * _HOST_SHARE), _HOST_LIMIT)
    return allowed


def _at_least_two(num_bytes: int, block_bytes: int, flag: str) -> int:
    num_blocks = num_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache would get {max(num_bytes, 0)} bytes and a block takes {block_bytes}: at least 2 blocks are "
            f"needed; raise {flag} or free memory on the device"
        )
    return num_blocks


@contextlib.contextmanager
def _refused_memory(num_bytes: int, what: str, flags: str) -> Iterator[None]:
    """Tells the operator which flag asked for memory that there is not; torch says it in words of its own."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"the {what} of {num_bytes} bytes could not be had ({str(error).splitlines()[0][:200]}); lower {flags}"
        ) from error


def _slabs(backend: Backend, layout: KVLayout, num_slabs: int, num_blocks: int) -> list[KVSlab]:
    size = layout.block_bytes * num_blocks
    with _refused_memory(num_slabs * size, "KV cache", "--num-kv-blocks or --kv-cache-memory-bytes"):
        memory = backend.arena("kv", num_slabs * size).tensor
    return [
        KVSlab(tensor=memory[index * size : (index + 1) * size], layout=layout, num_blocks=num_blocks)
        for index in range(num_slabs)
    ]


def _host_slab(layout: KVLayout, num_blocks: int) -> KVSlab:
    size = layout.block_bytes * num_blocks
    with _refused_memory(size, "swap space of a layer", "--swap-space"):
        memory = torch.empty(size, dtype=torch.uint8)
    return KVSlab(tensor=memory, layout=layout, num_blocks=num_blocks)


def _group_ops(layers: Sequence[int], ops: Sequence[Sequence[OpSpec]]) -> tuple[OpSpec, ...]:
    return tuple(dict.fromkeys(op for layer in layers for op in ops[layer]))
