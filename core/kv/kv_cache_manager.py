"""Who may use which blocks: prefix hits, growth, sliding windows, swapping and release, over one BlockPool."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

from core.kv.block_pool import Block, BlockPool
from core.kv.block_table import BlockTable
from core.kv.groups import KVCacheGroups
from core.kv.prefix_cache import BlockHasher
from core.kv.tiers import KVTier
from core.request import Request

__all__ = ["KVCacheManager", "PrefixHit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHit:
    """What the prefix cache holds of a request; valid until the next allocation.

    Args:
        num_tokens: Tokens [0, num_tokens) need not be computed; a multiple of the block size.
        blocks: For each group the entries of its block table up to there, with the null block where the group's
            window no longer reaches. Not referenced yet.
    """

    num_tokens: int
    blocks: tuple[list[Block], ...]


class _RequestBlocks:
    """What one request holds on the device."""

    __slots__ = ("cacheable", "num_hashed", "tables")

    def __init__(self, tables: tuple[BlockTable, ...], num_hashed: int, cacheable: bool = True) -> None:
        self.tables = tables
        self.num_hashed = num_hashed
        """Blocks [0, num_hashed) are done with: registered where possible, released where out of the window."""
        self.cacheable = cacheable
        """Whether its blocks may be registered; false for what was computed before the cache was reset."""


@dataclass(slots=True)
class _SwappedBlocks:
    """What one request holds in the swap tier: for each group the released entries and the ids of the live ones."""

    num_released: list[int]
    host_ids: list[list[int]]
    cacheable: bool


class KVCacheManager:
    """Gives blocks to requests and takes them back.

    The tables of a request have the same length in every group. All methods are cheap host work; none blocks.
    Steps run in the order in which they were scheduled, so a block given back may be handed out at once.

    Args:
        groups: Cache groups of the model.
        num_blocks: Blocks of the device pool, the null block counted.
        block_size: Tokens a block.
        enable_prefix_caching: Whether contents are hashed and found again.
        swap_tier: Where swapped-out blocks go; None means that nothing can be swapped out.
    """

    def __init__(
        self,
        groups: KVCacheGroups,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        swap_tier: KVTier | None = None,
    ) -> None:
        assert groups.groups, "a model without any cache needs no KVCacheManager"
        self.groups = groups
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, len(groups.groups))
        self.swap_tier = swap_tier
        self._num_groups = len(groups.groups)
        self._windows = [group.window for group in groups.groups]
        self._hasher = BlockHasher(block_size)
        self._held: dict[str, _RequestBlocks] = {}
        self._swapped: dict[str, _SwappedBlocks] = {}
        self._host_ids_to_free: list[int] = []
        self.no_block_ids: tuple[list[int], ...] = tuple([] for _ in groups.groups)
        """An empty list for each group, shared by all who have nothing to say; never to be written."""

    # How much fits

    @property
    def usage(self) -> float:
        """Share of the device blocks that requests hold, in [0, 1]."""
        return self.pool.usage

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request holds at a time while `num_tokens` tokens are computed in small chunks."""
        num_entries = -(-num_tokens // self.block_size)
        return sum(min(num_entries, self._window_blocks(window) + 1) for window in self._windows)

    def capacity_tokens(self, *, whole: bool = False) -> int:
        """Most tokens that one request can have computed when it has the pool for itself.

        Args:
            whole: Whether all tokens must be computed in one step (no chunked prefill).
        """
        usable = self.pool.num_usable_blocks
        if whole:
            return usable // self._num_groups * self.block_size
        if self.peak_blocks(sys.maxsize) <= usable:
            return sys.maxsize
        low, high = 0, usable
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak_blocks(middle * self.block_size) <= usable else (low, middle - 1)
        return low * self.block_size

    def num_outstanding_blocks(self, request: Request) -> int:
        """Blocks that a running request will still take for the tokens that it has now."""
        state = self._held[request.request_id]
        return max(0, self.peak_blocks(request.num_tokens) - sum(table.num_live for table in state.tables))

    def can_admit(self, request: Request, hit: PrefixHit | None, num_reserved: int) -> bool:
        """Whether all known tokens of a waiting request fit beside what is held and `num_reserved` blocks."""
        shared = 0 if hit is None else sum(b.ref_count > 0 for blocks in hit.blocks for b in blocks if b.block_id)
        return self.peak_blocks(request.num_tokens) - shared + num_reserved <= self.pool.num_free_blocks

    def num_fitting_tokens(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Most tokens past `num_computed_tokens` for which `allocate_slots` would succeed now."""
        state = self._held.get(request.request_id)
        num_entries = len(state.tables[0]) if state is not None else _num_entries(hit)
        num_new = (self.pool.num_free_blocks - self._num_unheld(hit)) // self._num_groups
        return max(0, (num_entries + num_new) * self.block_size - request.num_computed_tokens)

    # Prefix cache

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest prefix of the request that every group still has; at most all tokens but the last.

        In a group with a sliding window only the blocks that the window before the hit's end reaches must be there.
        A request that wants prompt_logprobs finds nothing, since these come from computing each position.
        """
        if not self.enable_prefix_caching or request.sampling_params.prompt_logprobs is not None:
            return PrefixHit(num_tokens=0, blocks=tuple([] for _ in self._windows))
        length = self._common_hit(request, self._full_hit(request, (request.num_tokens - 1) // self.block_size))
        blocks = tuple(self._hit_entries(request, group, length) for group in range(self._num_groups))
        return PrefixHit(num_tokens=length * self.block_size, blocks=blocks)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Takes note that tokens [0, num_tokens) are known and that a step which ended has computed them.

        Makes the full ones among their blocks findable, and gives back those that left a sliding window.
        """
        state = self._held.get(request.request_id)
        if state is None:
            return
        num_full = num_tokens // self.block_size
        if num_full <= state.num_hashed:
            return
        if self.enable_prefix_caching and state.cacheable:
            self._register(request, state, num_full)
        state.num_hashed = num_full
        self._release(state, num_tokens)

    def reset_prefix_cache(self) -> None:
        """Makes nothing findable any more, neither now nor later from what has been computed up to now."""
        self.pool.forget_all()
        for state in self._held.values():
            state.cacheable = False
        for swapped in self._swapped.values():
            swapped.cacheable = False

    # Growth and release

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None
    ) -> tuple[list[int], ...] | None:
        """Block ids appended to the table of each group so that the next `num_new_tokens` tokens have slots.

        Args:
            request: `num_computed_tokens` says where the new tokens start; after a hit, at its end.
            num_new_tokens: Tokens to be computed in the step.
            hit: For a request that holds nothing yet: what it takes over from the prefix cache.

        Returns:
            Fresh ids per group, read-only; None, and nothing changed, where the pool lacks blocks.
        """
        state = self._held.get(request.request_id)
        num_entries = len(state.tables[0]) if state is not None else _num_entries(hit)
        num_new = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - num_entries
        if num_new <= 0 and state is not None:
            return self.no_block_ids
        if num_new * self._num_groups + self._num_unheld(hit) > self.pool.num_free_blocks:
            return None
        if state is None:
            state = self._attach(request, hit)
        return self._grow(state, max(num_new, 0))

    def block_ids(self, request: Request) -> tuple[list[int], ...]:
        """The block table of each group as new lists of ids; the null block where a window has passed."""
        return tuple(table.block_ids for table in self._held[request.request_id].tables)

    def free(self, request: Request) -> None:
        """Takes back all that the request holds, on the device and in the swap tier; it may hold nothing."""
        state = self._held.pop(request.request_id, None)
        if state is not None:
            for table in state.tables:
                self.pool.free(reversed(table.blocks))
        swapped = self._swapped.pop(request.request_id, None)
        if swapped is not None:
            self._host_ids_to_free.extend(i for ids in swapped.host_ids for i in ids)

    # Swapping

    def begin_step(self) -> None:
        """Gives back swap-tier blocks that the step before read; called once before each step is scheduled.

        Not earlier: within a step blocks are copied out before they are copied in, so that a block which the step
        still reads must not be written by it.
        """
        if self._host_ids_to_free and self.swap_tier is not None:
            self.swap_tier.free(self._host_ids_to_free)
            self._host_ids_to_free = []

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Moves the request's computed blocks to the swap tier and frees its device blocks.

        Returns:
            (device block, host block) pairs for `SchedulerOutput.swap_out`; None, and nothing changed, where the
            tier lacks room or nothing has been computed.
        """
        if self.swap_tier is None or request.num_computed_tokens == 0:
            return None
        state = self._held[request.request_id]
        self._release(state, request.num_computed_tokens - request.num_drafts_in_flight)
        num_filled = -(-request.num_computed_tokens // self.block_size)
        live = [table.blocks[table.num_released : num_filled] for table in state.tables]
        host_ids = self.swap_tier.allocate(sum(map(len, live)))
        if host_ids is None:
            return None
        pairs = [(block.block_id, host) for block, host in zip((b for bs in live for b in bs), host_ids, strict=True)]
        rest = iter(host_ids)
        self.free(request)
        self._swapped[request.request_id] = _SwappedBlocks(
            num_released=[table.num_released for table in state.tables],
            host_ids=[[next(rest) for _ in blocks] for blocks in live],
            cacheable=state.cacheable,
        )
        return pairs

    def swap_in(self, request: Request) -> list[tuple[int, int]] | None:
        """Gives a swapped-out request device blocks again.

        Returns:
            (host block, device block) pairs for `SchedulerOutput.swap_in`; None, and nothing changed, where the
            pool lacks blocks.
        """
        swapped = self._swapped[request.request_id]
        host_ids = [i for ids in swapped.host_ids for i in ids]
        if len(host_ids) > self.pool.num_free_blocks:
            return None
        fresh = iter(self.pool.allocate(len(host_ids)))
        tables = tuple(
            BlockTable([self.pool.null_block] * released + [next(fresh) for _ in ids], released)
            for released, ids in zip(swapped.num_released, swapped.host_ids, strict=True)
        )
        self._held[request.request_id] = _RequestBlocks(tables, num_hashed=0, cacheable=swapped.cacheable)
        del self._swapped[request.request_id]
        self._host_ids_to_free.extend(host_ids)
        device_ids = [block.block_id for table in tables for block in table.blocks[table.num_released :]]
        return list(zip(host_ids, device_ids, strict=True))

    def check_integrity(self) -> None:
        """Asserts that pool, tables and swap tier account for every block."""
        self.pool.check_integrity()
        references: Counter[int] = Counter()
        owner: dict[int, int] = {}
        for request_id, state in self._held.items():
            assert len({len(table) for table in state.tables}) == 1, f"tables of {request_id} differ in length"
            for group, table in enumerate(state.tables):
                self._check_table(request_id, table)
                for block in table.blocks[table.num_released :]:
                    references[block.block_id] += 1
                    assert owner.setdefault(block.block_id, group) == group, f"{block} serves two groups"
        for block in self.pool.blocks[1:]:
            assert block.ref_count == references[block.block_id], f"{block} has {references[block.block_id]} holders"
        if self.swap_tier is not None:
            self.swap_tier.check_integrity()
            num_held = sum(len(ids) for s in self._swapped.values() for ids in s.host_ids) + len(self._host_ids_to_free)
            assert self.swap_tier.num_free_blocks + num_held == self.swap_tier.num_blocks, "swap blocks got lost"

    @property
    def num_holders(self) -> int:
        """Requests that hold blocks, on the device or in the swap tier."""
        return len(self._held) + len(self._swapped)

    def _check_table(self, request_id: str, table: BlockTable) -> None:
        null = self.pool.null_block
        assert all(block is null for block in table.blocks[: table.num_released]), f"{request_id} kept a released block"
        assert all(block is not null for block in table.blocks[table.num_released :]), f"{request_id} lost a block"

    def _window_blocks(self, window: int) -> int:
        """Blocks before a block boundary that the window of the query at the boundary reaches."""
        return -(-(window - 1) // self.block_size) if window else sys.maxsize

    def _num_unheld(self, hit: PrefixHit | None) -> int:
        """Blocks of a hit that would leave the free list."""
        if hit is None or not hit.num_tokens:
            return 0
        return sum(block.ref_count == 0 for blocks in hit.blocks for block in blocks)

    def _attach(self, request: Request, hit: PrefixHit | None) -> _RequestBlocks:
        assert request.request_id not in self._swapped, f"{request} must be swapped in first"
        found = hit.blocks if hit is not None else tuple([] for _ in self._windows)
        tables = tuple(BlockTable(blocks, sum(b is self.pool.null_block for b in blocks)) for blocks in found)
        for table in tables:
            self.pool.touch(table.blocks)
        state = self._held[request.request_id] = _RequestBlocks(tables, num_hashed=_num_entries(hit))
        return state

    def _grow(self, state: _RequestBlocks, num_new: int) -> tuple[list[int], ...]:
        new_ids = []
        for table in state.tables:
            blocks = self.pool.allocate(num_new)
            table.append(blocks)
            new_ids.append([block.block_id for block in blocks])
        return tuple(new_ids)

    def _register(self, request: Request, state: _RequestBlocks, num_full: int) -> None:
        for index in range(state.num_hashed, num_full):
            block_hash = self._hasher.get(request, index)
            for group, table in enumerate(state.tables):
                if index >= table.num_released:
                    self.pool.register(table.blocks[index], block_hash, group)

    def _release(self, state: _RequestBlocks, num_computed_tokens: int) -> None:
        """Frees what no query at or after `num_computed_tokens` can see."""
        for window, table in zip(self._windows, state.tables, strict=True):
            if window:
                end = max(0, num_computed_tokens - window + 1) // self.block_size
                self.pool.free(reversed(table.release(end, self.pool.null_block)))

    def _full_hit(self, request: Request, limit: int) -> int:
        """Leading blocks, at most `limit`, that every group without a window has. Hashes no further than needed."""
        full = [group for group, window in enumerate(self._windows) if not window]
        if not full:
            return limit
        for index in range(limit):
            block_hash = self._hasher.get(request, index)
            if any(self.pool.find(block_hash, group) is None for group in full):
                return index
        return limit

    def _common_hit(self, request: Request, length: int) -> int:
        """The longest hit of at most `length` blocks whose tail every sliding group has."""
        while length:
            missing = self._last_missing(request, length)
            if missing is None:
                return length
            length = missing  # any longer hit, up to the last one tried, needs the missing block too
        return 0

    def _last_missing(self, request: Request, length: int) -> int | None:
        for group, window in enumerate(self._windows):
            start = max(0, length - self._window_blocks(window)) if window else length
            for index in range(length - 1, start - 1, -1):
                if self.pool.find(self._hasher.get(request, index), group) is None:
                    return index
        return None

    def _hit_entries(self, request: Request, group: int, length: int) -> list[Block]:
        window = self._windows[group]
        start = max(0, length - self._window_blocks(window)) if window else 0
        entries = [self.pool.null_block] * start
        for index in range(start, length):
            block = self.pool.find(self._hasher.get(request, index), group)
            assert block is not None, "a block of the hit is gone"
            entries.append(block)
        return entries


def _num_entries(hit: PrefixHit | None) -> int:
    return len(hit.blocks[0]) if hit is not None else 0
