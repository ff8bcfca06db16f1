"""What models that the core has no file for would ask of a device, as plain lists for `core doctor --ops FILE`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["operation_sets"]


def operation_sets() -> dict[str, Path]:
    """The file of each list, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.toml"))}
