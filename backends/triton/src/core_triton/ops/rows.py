"""How kernels that hold whole rows are cut: rows of a program by their width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core_triton.target import Target
from core_triton.tuning import tunings

__all__ = ["RowTiles", "power_of_two", "row_tiles", "tuned_widths"]

_NARROW, _WIDE = 1024, 8192


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True)
class RowTiles:
    """Rows of a program, their padded width, and the launch."""

    rows: int
    block: int
    num_warps: int
    num_stages: int

    def programs(self, num_rows: int) -> int:
        """Programs for that many rows."""
        return -(-num_rows // self.rows)

    def launch(self) -> dict[str, int]:
        """Keywords of the launch."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.num_warps, "num_stages": self.num_stages}


def row_tiles(width: int, target: Target, least: int = 16) -> RowTiles:
    """For rows of that width.

    Args:
        least: The narrowest block.
    """
    block = max(power_of_two(width), least)
    name = "narrow" if block <= _NARROW else "wide" if block <= _WIDE else "widest"
    tuning = tunings("rows", target)[name]
    warps = min(tuning.num_warps, 512 // target.warp_size)
    rows = max(1, tuning["elements"] // block)
    return RowTiles(rows=rows, block=block, num_warps=warps, num_stages=tuning.num_stages)


def tuned_widths(target: Target) -> Iterator[tuple[int, RowTiles]]:
    """One usual width of every class, for builds."""
    for width in (128, 4096, 16384):
        yield width, row_tiles(width, target)
