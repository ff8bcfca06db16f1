"""Bugs of scheduler and KV manager, planted by rebinding one method for the time of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from core.kv import prefix_cache
from core.kv.block_pool import Block, BlockPool
from core.kv.kv_cache_manager import KVCacheManager, PrefixHit
from core.kv.prefix_cache import BlockHasher, hash_block, hash_root
from core.request import Request
from core.sched.running import RunningRequests
from core.sched.scheduler import Scheduler

__all__ = [
    "abort_leaks_a_block",
    "block_freed_while_referenced",
    "full_hit_skips_the_last_token",
    "hash_ignores_parent",
    "hash_ignores_salt",
    "resumed_with_stale_count",
    "swapped_in_elsewhere",
]


@contextmanager
def hash_ignores_parent() -> Iterator[None]:
    """A block's name covers its own tokens and the root, and not the blocks before it."""

    def get(self: BlockHasher, request: Request, index: int) -> bytes:
        root = hash_root(request.adapter, request.cache_salt)
        tokens = request.all_token_ids[index * self.block_size : (index + 1) * self.block_size]
        return hash_block(root, tokens)

    with mock.patch.object(BlockHasher, "get", get):
        yield


@contextmanager
def hash_ignores_salt() -> Iterator[None]:
    """Requests of every salt share their blocks."""
    honest = prefix_cache.hash_root
    with mock.patch.object(prefix_cache, "hash_root", lambda adapter, cache_salt: honest(adapter, None)):
        yield


@contextmanager
def full_hit_skips_the_last_token() -> Iterator[None]:
    """A hit may cover every token of the prompt; the engine then samples from a token that it takes for computed."""

    def get_computed_blocks(self: KVCacheManager, request: Request) -> PrefixHit:
        if not self.enable_prefix_caching or request.sampling_params.prompt_logprobs is not None:
            return PrefixHit(num_tokens=0, blocks=tuple([] for _ in self._windows))
        length = self._common_hit(request, self._full_hit(request, request.num_tokens // self.block_size))
        blocks = tuple(self._hit_entries(request, group, length) for group in range(self._num_groups))
        return PrefixHit(num_tokens=length * self.block_size, blocks=blocks)

    with mock.patch.object(KVCacheManager, "get_computed_blocks", get_computed_blocks):
        yield


@contextmanager
def block_freed_while_referenced() -> Iterator[None]:
    """Whoever gives back a shared block puts it into the free list, although others still read it."""

    def free(self: BlockPool, blocks: Any) -> None:
        for block in blocks:
            if block is self.null_block or block.ref_count == 0:
                continue
            block.ref_count = 0
            (self._free.push_front if block.block_hash is None else self._free.push_back)(block)

    with mock.patch.object(BlockPool, "free", free):
        yield


@contextmanager
def resumed_with_stale_count() -> Iterator[None]:
    """A preempted request keeps its `num_computed_tokens`, and goes on as if its blocks still held them."""
    honest = RunningRequests._preempt

    def preempt(self: RunningRequests, victim: Request, step: Any) -> None:
        computed = victim.num_computed_tokens
        honest(self, victim, step)
        victim.num_computed_tokens = computed

    def get_computed_blocks(self: KVCacheManager, request: Request) -> PrefixHit:
        hit: PrefixHit = looked_up(self, request)
        if request.num_restarts and request.num_computed_tokens > hit.num_tokens:
            return PrefixHit(num_tokens=min(request.num_computed_tokens, request.num_tokens - 1), blocks=hit.blocks)
        return hit

    looked_up = KVCacheManager.get_computed_blocks
    with (
        mock.patch.object(RunningRequests, "_preempt", preempt),
        mock.patch.object(KVCacheManager, "get_computed_blocks", get_computed_blocks),
    ):
        yield


@contextmanager
def abort_leaks_a_block() -> Iterator[None]:
    """An aborted request gives back all blocks but one, and the books are made to agree."""
    leaked: list[Block] = []

    def abort(self: Scheduler, request_ids: Any) -> list[str]:
        ids = list(request_ids)
        for request_id in ids:
            state = self.kv._held.get(request_id)
            if state is not None and state.tables[0].num_live:
                block = state.tables[0].blocks[-1]
                self.kv.pool.touch([block])
                leaked.append(block)
        return honest(self, ids)

    def check_integrity(self: KVCacheManager) -> None:
        self.pool.check_integrity()

    honest = Scheduler.abort
    with (
        mock.patch.object(Scheduler, "abort", abort),
        mock.patch.object(KVCacheManager, "check_integrity", check_integrity),
    ):
        yield


@contextmanager
def swapped_in_elsewhere() -> Iterator[None]:
    """Blocks come back from host memory in the wrong order."""
    honest = KVCacheManager.swap_in

    def swap_in(self: KVCacheManager, request: Request) -> list[tuple[int, int]] | None:
        pairs = honest(self, request)
        if pairs is None or len(pairs) < 2:
            return pairs
        hosts, blocks = zip(*pairs, strict=True)
        return list(zip(hosts, reversed(blocks), strict=True))

    with mock.patch.object(KVCacheManager, "swap_in", swap_in):
        yield
