"""Where blocks can go besides the device pool. Bookkeeping only: data moves in the runner, by block id."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from core.errors import ConfigError

__all__ = ["HostTier", "KVTier"]


@runtime_checkable
class KVTier(Protocol):
    """A place for blocks of equal size, addressed by ids of its own in [0, num_blocks)."""

    name: str
    num_blocks: int

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out now."""
        ...

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Ids of that many blocks, now the caller's; None, and nothing changed, where there are not enough."""
        ...

    def free(self, block_ids: list[int]) -> None:
        """Gives blocks back. Copies that read them must have been ordered before any later write."""
        ...

    def check_integrity(self) -> None:
        """Asserts that the books of the tier agree with themselves."""
        ...


class HostTier:
    """Blocks in host memory, for requests that were preempted by swapping.

    Args:
        num_blocks: Blocks that the reserved host memory holds; 0 makes a tier that never has room.
    """

    name = "host"

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ConfigError(f"the host tier needs 0 blocks or more, got {num_blocks}; check --swap-space")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Ids of that many host blocks, or None where there are not enough."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        self._held.update(taken)
        return taken

    def free(self, block_ids: list[int]) -> None:
        """Gives host blocks back."""
        for block_id in block_ids:
            assert block_id in self._held, f"host block {block_id} was freed twice"
            self._held.remove(block_id)
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Asserts that each host block is either free or held."""
        free = set(self._free)
        assert len(free) == len(self._free), "a host block is free twice"
        assert not free & self._held, f"host blocks {free & self._held} are free and held"
        assert len(free) + len(self._held) == self.num_blocks, "host blocks got lost"
