"""Chips by the figures that their vendors publish."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from core.errors import CoreError
from core.spec import DType

__all__ = ["CHIPS", "Chip", "chip_named"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip.

    Args:
        name: The word of `--chip`.
        backend: The backend that serves it.
        arch: That backend's word for its architecture.
        bandwidth: Of its memory, bytes a second.
        rates: Operations of dense products a second by type ("float8" stands for all of 8 bits); a multiply-add is two.
        source: Where the figures are from.
    """

    name: str
    backend: str
    arch: str
    bandwidth: float
    rates: Mapping[str, float]
    source: str

    def rate(self, dtype: DType) -> float:
        """Operations a second of products in `dtype`; those of a wider type where the chip has none of its own."""
        name = "float8" if dtype.value.startswith("float8") else dtype.value
        for known in (name, "bfloat16", "float16"):
            if known in self.rates:
                return self.rates[known]
        return max(self.rates.values())


def _load() -> dict[str, Chip]:
    text = resources.files("core_triton.roofline").joinpath("chips.toml").read_text(encoding="utf-8")
    return {
        name: Chip(
            name=name,
            backend=entry["backend"],
            arch=entry["arch"],
            bandwidth=entry["bandwidth"] * 1e9,
            rates={dtype: rate * 1e12 for dtype, rate in entry["rates"].items()},
            source=entry["source"],
        )
        for name, entry in tomllib.loads(text).items()
    }


CHIPS: Mapping[str, Chip] = _load()
"""By name, as in `chips.toml`."""


def chip_named(name: str) -> Chip:
    """The chip of that name.

    Raises:
        CoreError: there is none.
    """
    if name not in CHIPS:
        raise CoreError(f"no figures of a chip {name!r}; give one of {', '.join(CHIPS)}")
    return CHIPS[name]
