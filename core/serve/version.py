"""The version of the installed distribution."""

from __future__ import annotations

from importlib import metadata

__all__ = ["product_version"]


def product_version() -> str:
    """As in the package's metadata; "unknown" where the code runs without being installed."""
    try:
        return metadata.version("core-inference")
    except metadata.PackageNotFoundError:
        return "unknown"
