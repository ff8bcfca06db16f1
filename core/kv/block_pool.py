"""Blocks of the device pool: who holds them, which are free, and which can be found again by content."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from core.errors import ConfigError

__all__ = ["NULL_BLOCK_ID", "Block", "BlockPool"]

NULL_BLOCK_ID = 0
"""The reserved block: placeholder for what is not kept, and target of padding rows. It never holds a request's data."""


class Block:
    """One block of the pool. Owned by the BlockPool; holders read it and never write.

    A block with `ref_count` 0 is in the free list, also while `block_hash` says that its content can be found again.
    """

    __slots__ = ("block_hash", "block_id", "group", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        """Chained hash under which the content is registered; None where it is not."""
        self.group = 0
        """Cache group in which `block_hash` is registered; without meaning where that is None."""
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.block_hash is not None})"


class FreeList:
    """Free blocks in eviction order, the next victim first; every operation is O(1)."""

    __slots__ = ("_head", "_tail", "size")

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.prev = self._head
        self.size = 0

    def push_back(self, block: Block) -> None:
        """Adds a block that is to be taken last."""
        assert self._tail.prev is not None
        self._link(self._tail.prev, block, self._tail)

    def push_front(self, block: Block) -> None:
        """Adds a block that is to be taken next."""
        assert self._head.next is not None
        self._link(self._head, block, self._head.next)

    def remove(self, block: Block) -> None:
        """Takes a block out, wherever it stands."""
        assert block.prev is not None and block.next is not None, f"{block} is not in the free list"
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = None
        self.size -= 1

    def pop_front(self) -> Block:
        """Takes the next victim. The list must not be empty."""
        block = self._head.next
        assert block is not None and block is not self._tail, "the free list is empty"
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.prev is None and block.next is None, f"{block} is in the free list already"
        block.prev, block.next = before, after
        before.next = after.prev = block
        self.size += 1


class BlockPool:
    """All blocks of one device pool, shared by every cache group.

    Args:
        num_blocks: Blocks of the pool, the null block counted.
        num_groups: Cache groups that register content; the same hash in two groups names two blocks.

    Raises:
        ConfigError: where there is no block besides the null block.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"the KV pool has {num_blocks} blocks and block 0 is reserved; give at least 2 with --num-kv-blocks"
            )
        self.num_blocks = num_blocks
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.null_block.ref_count = 1
        self._cached: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        self._free = FreeList()
        for block in self.blocks[1:]:
            self._free.push_back(block)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out now; those with findable content are among them."""
        return self._free.size

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold at most."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, in [0, 1]."""
        return 1.0 - self._free.size / self.num_usable_blocks

    def allocate(self, num_blocks: int) -> list[Block]:
        """Takes the next victims off the free list; each comes with one reference and its old content forgotten.

        The caller checks `num_free_blocks` first.
        """
        assert num_blocks <= self._free.size, f"{num_blocks} blocks asked for, {self._free.size} free"
        taken = [self._free.pop_front() for _ in range(num_blocks)]
        for block in taken:
            self._forget(block)
            block.ref_count = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a reference to each block, taking it off the free list where it was there. Null blocks are let be."""
        for block in blocks:
            if block is self.null_block:
                continue
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Gives back one reference of each block; null blocks are let be.

        Blocks whose content can be found again are evicted in the order in which they were given back, those
        without such content before them. So give back a sequence from its end: its start is of use to most.
        """
        for block in blocks:
            if block is self.null_block:
                continue
            assert block.ref_count > 0, f"{block} was freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.block_hash is None:
                    self._free.push_front(block)
                else:
                    self._free.push_back(block)

    def register(self, block: Block, block_hash: bytes, group: int) -> None:
        """Makes the content of a block findable. Where another block has the same content, that one stays findable."""
        assert block.ref_count > 0 and block is not self.null_block, f"{block} is not held"
        cached = self._cached[group]
        if block.block_hash is None and block_hash not in cached:
            block.block_hash, block.group = block_hash, group
            cached[block_hash] = block

    def find(self, block_hash: bytes, group: int) -> Block | None:
        """The block with this content in this group, or None. It may be free: `touch` it before the next `allocate`."""
        return self._cached[group].get(block_hash)

    def forget_all(self) -> None:
        """Makes no content findable any more; who holds blocks keeps them."""
        for cached in self._cached:
            for block in list(cached.values()):
                self._forget(block)

    def check_integrity(self) -> None:
        """Asserts that free list, reference counts and registered contents agree."""
        free = [block.block_id for block in self._free]
        assert len(free) == len(set(free)) == self._free.size, "the free list repeats or miscounts blocks"
        unheld = {block.block_id for block in self.blocks if block.ref_count == 0}
        assert set(free) == unheld, f"free list and reference counts disagree on {set(free) ^ unheld}"
        assert self.null_block.ref_count == 1 and self.null_block.block_hash is None, "the null block was used"
        registered = [(group, key, block) for group, map_ in enumerate(self._cached) for key, block in map_.items()]
        for group, key, block in registered:
            assert (block.block_hash, block.group) == (key, group), f"{block} is registered under another key"
        num_hashed = sum(block.block_hash is not None for block in self.blocks)
        assert num_hashed == len(registered), f"{num_hashed} blocks have a hash, {len(registered)} are registered"

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._cached[block.group][block.block_hash]
            block.block_hash = None
