"""What binds a kernel to an operation of the contract: refusals, launch, and the builds that prove it compiles.

Triton itself is imported only by who binds or builds.
"""

from __future__ import annotations

import importlib

__all__ = ["load"]

_MODULES: tuple[str, ...] = (
    "activation",
    "embed",
    "linear",
    "norm",
    "experts",
    "rejection",
    "route",
    "sampling",
    "attention",
    "kv_write",
    "merge",
    "blocks",
    "conv1d",
    "gated_delta",
    "index_topk",
    "mla",
    "mla_prolog",
    "rope",
    "ssd",
)
"""Modules of this package, each of which registers the kernels of its operations."""


def load() -> None:
    """Registers every operation that has a kernel. Idempotent."""
    for name in _MODULES:
        importlib.import_module(f"{__name__}.{name}")
