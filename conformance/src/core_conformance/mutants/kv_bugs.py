"""Bugs of the scheduler and of the KV cache's books, planted by rebinding one method for the time of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from core.kv import prefix_cache
from core.kv.block_pool import Block, BlockPool
from core.kv.kv_cache_manager import KVCacheManager, PrefixHit
from core.kv.prefix_cache import BlockHasher, hash_block, hash_root
from core.outputs import FinishReason
from core.request import Request
from core.sched import finish, report
from core.sched.running import RunningRequests
from core.sched.scheduler import Scheduler
from core_conformance.mutants.variant import Mutant, engine_bug

__all__ = ["MUTANTS"]


@contextmanager
def _hash_ignores_parent() -> Iterator[None]:
    """A block's name covers its own tokens and the root, and not the blocks before it."""

    def get(self: BlockHasher, request: Request, index: int) -> bytes:
        root = hash_root(request.adapter, request.cache_salt)
        tokens = request.all_token_ids[index * self.block_size : (index + 1) * self.block_size]
        return hash_block(root, tokens)

    with mock.patch.object(BlockHasher, "get", get):
        yield


@contextmanager
def _hash_ignores_salt() -> Iterator[None]:
    """Requests of every salt share their blocks."""
    honest = prefix_cache.hash_root
    with mock.patch.object(prefix_cache, "hash_root", lambda adapter, cache_salt: honest(adapter, None)):
        yield


@contextmanager
def _empty_salt_is_none() -> Iterator[None]:
    """An empty salt is taken for none."""
    honest = prefix_cache.hash_root
    with mock.patch.object(prefix_cache, "hash_root", lambda adapter, cache_salt: honest(adapter, cache_salt or None)):
        yield


@contextmanager
def _hash_of_half_a_block() -> Iterator[None]:
    """A block's name covers the first half of its tokens."""
    honest = prefix_cache.hash_block

    def short(parent: bytes, token_ids: Any, multimodal_hashes: Any = ()) -> bytes:
        return honest(parent, token_ids[: len(token_ids) // 2], multimodal_hashes)

    with mock.patch.object(prefix_cache, "hash_block", short):
        yield


@contextmanager
def _full_hit_skips_the_last_token() -> Iterator[None]:
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
def _cache_that_is_off_is_asked() -> Iterator[None]:
    """Blocks are registered and found although prefix caching is off."""
    honest = KVCacheManager.__init__

    def init(self: KVCacheManager, *args: Any, **kwargs: Any) -> None:
        honest(self, *args, **(kwargs | {"enable_prefix_caching": True}))

    with mock.patch.object(KVCacheManager, "__init__", init):
        yield


@contextmanager
def _evicted_block_is_still_found() -> Iterator[None]:
    """A block that is handed out keeps the name of its old content until it gets another one."""
    honest = BlockPool.register

    def register(self: BlockPool, block: Block, block_hash: bytes, group: int) -> None:
        if block.block_hash is not None and block.block_hash != block_hash:
            self._forget(block)
        honest(self, block, block_hash, group)

    def allocate(self: BlockPool, num_blocks: int) -> list[Block]:
        taken = [self._free.pop_front() for _ in range(num_blocks)]
        for block in taken:
            block.ref_count = 1
        return taken

    with mock.patch.object(BlockPool, "register", register), mock.patch.object(BlockPool, "allocate", allocate):
        yield


@contextmanager
def _hit_counts_the_next_block() -> Iterator[None]:
    """The rest of a prompt behind its hit counts as found where it begins a block."""
    honest = KVCacheManager.get_computed_blocks

    def get_computed_blocks(self: KVCacheManager, request: Request) -> PrefixHit:
        hit = honest(self, request)
        more = min(self.block_size // 2, request.num_tokens - 1 - hit.num_tokens)
        return dataclasses.replace(hit, num_tokens=hit.num_tokens + more) if hit.num_tokens and more > 0 else hit

    with mock.patch.object(KVCacheManager, "get_computed_blocks", get_computed_blocks):
        yield


@contextmanager
def _block_freed_while_referenced() -> Iterator[None]:
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
def _window_block_freed_too_early() -> Iterator[None]:
    """A sliding window gives its blocks back one block before the last query that reads them."""
    honest = KVCacheManager._release

    def release(self: KVCacheManager, state: Any, num_computed_tokens: int) -> None:
        honest(self, state, num_computed_tokens + self.block_size)

    with mock.patch.object(KVCacheManager, "_release", release):
        yield


@contextmanager
def _resumed_with_stale_count() -> Iterator[None]:
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
def _swapped_in_elsewhere() -> Iterator[None]:
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


@contextmanager
def _abort_leaks_a_block() -> Iterator[None]:
    """An aborted request gives back all blocks but one, and the books are made to agree."""

    def abort(self: Scheduler, request_ids: Any) -> list[str]:
        ids = list(request_ids)
        for request_id in ids:
            state = self.kv._held.get(request_id)
            if state is not None and state.tables[0].num_live:
                self.kv.pool.touch([state.tables[0].blocks[-1]])
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
def _abort_forgets_the_swap_tier() -> Iterator[None]:
    """What an aborted request had swapped out stays in host memory."""

    def free(self: KVCacheManager, request: Request) -> None:
        state = self._held.pop(request.request_id, None)
        if state is not None:
            for table in state.tables:
                self.pool.free(reversed(table.blocks))
        self._swapped.pop(request.request_id, None)

    with mock.patch.object(KVCacheManager, "free", free):
        yield


@contextmanager
def _one_token_more() -> Iterator[None]:
    """A request ends one token past its `max_tokens`."""
    honest = finish.check_finish

    def check_finish(request: Request) -> FinishReason | None:
        reason = honest(request)
        return None if reason is FinishReason.LENGTH and request.num_output_tokens == request.max_tokens else reason

    with mock.patch.object(report, "check_finish", check_finish):
        yield


MUTANTS: tuple[Mutant, ...] = (
    engine_bug("prefix hash ignores the parent", "prefix-cache/parent", _hash_ignores_parent, "prefix-cache"),
    engine_bug("prefix hash ignores the salt", "prefix-cache/salt", _hash_ignores_salt, "prefix-cache"),
    engine_bug("empty salt taken for none", "prefix-cache/salt", _empty_salt_is_none, "prefix-cache"),
    engine_bug("prefix hash of half a block", "prefix-cache", _hash_of_half_a_block),
    engine_bug("full hit skips the last token", "prefix-cache/full", _full_hit_skips_the_last_token, "prefix-cache"),
    engine_bug("prefix cache that is off is asked", "prefix-cache/off", _cache_that_is_off_is_asked, "prefix-cache"),
    engine_bug(
        "evicted block still found", "prefix-cache/evicted", _evicted_block_is_still_found, "prefix-cache", "chance"
    ),
    engine_bug("hit counts half a block more", "prefix-cache/partial", _hit_counts_the_next_block, "prefix-cache"),
    engine_bug(
        "block freed while referenced", "prefix-cache/shared", _block_freed_while_referenced, "prefix-cache", "chance"
    ),
    engine_bug("window's block freed too early", "preemption", _window_block_freed_too_early, "prefix-cache", "greedy"),
    engine_bug("resumed with a stale count", "preemption/recompute", _resumed_with_stale_count, "preemption"),
    engine_bug("swapped in to the wrong blocks", "preemption/swap", _swapped_in_elsewhere),
    engine_bug("abort leaks a block", "abort", _abort_leaks_a_block),
    engine_bug("abort forgets the swap tier", "abort/all", _abort_forgets_the_swap_tier),
    engine_bug("one token past max_tokens", "greedy", _one_token_more, "sync", "abort"),
)
