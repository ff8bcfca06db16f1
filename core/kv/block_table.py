"""Which block holds which tokens of one request, in one cache group."""

from __future__ import annotations

from collections.abc import Iterable

from core.kv.block_pool import Block

__all__ = ["BlockTable"]


class BlockTable:
    """Blocks of one request in one cache group: entry i holds tokens [i * block_size, (i + 1) * block_size).

    Append-only: an entry is never moved or removed; one that left the sliding window becomes the null block.
    """

    __slots__ = ("blocks", "num_released")

    def __init__(self, blocks: Iterable[Block] = (), num_released: int = 0) -> None:
        self.blocks = list(blocks)
        self.num_released = num_released
        """Entries [0, num_released) are the null block."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_live(self) -> int:
        """Entries that hold a block of the pool."""
        return len(self.blocks) - self.num_released

    @property
    def block_ids(self) -> list[int]:
        """Block ids in order of tokens, as a new list."""
        return [block.block_id for block in self.blocks]

    def append(self, blocks: Iterable[Block]) -> None:
        """Adds blocks for the tokens that follow; the table takes over one reference of each."""
        self.blocks.extend(blocks)

    def release(self, end: int, null_block: Block) -> list[Block]:
        """Replaces the live entries below `end` by the null block and returns their blocks, for the caller to free."""
        start = self.num_released
        if end <= start:
            return []
        released = self.blocks[start:end]
        self.blocks[start:end] = [null_block] * len(released)
        self.num_released = start + len(released)
        return released
