"""Where the reference registers itself: composites by operation name, and declared decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.backend.ops.spec import OpSpec

__all__ = ["COMPOSITES", "DECOMPOSITIONS", "HOST_READERS", "composite", "decomposition"]

COMPOSITES: dict[str, Callable[..., Callable[..., Any]]] = {}
"""Operation name to a maker: `maker(op)` gives the callable of a leaf; `maker(op, **parts)` that of a decomposition,
where `parts` are the bound callables of what `DECOMPOSITIONS` named."""

DECOMPOSITIONS: dict[str, Callable[[Any], dict[str, OpSpec]]] = {}
"""Operation name to a function of the OpSpec that names the operations it consists of."""

HOST_READERS = frozenset(
    {
        "attention",
        "conv1d",
        "experts",
        "gated_delta",
        "index_topk",
        "lora_add_",
        "mla",
        "rejection_sample",
        "sample",
        "ssd",
    }
)
"""Operations whose composite looks at lengths or contents on the host: a recorded step must not hold them."""


def composite(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the maker of an operation's composite."""

    def register(maker: Callable[..., Any]) -> Callable[..., Any]:
        COMPOSITES[name] = maker
        return maker

    return register


def decomposition(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the parts of a coarse operation."""

    def register(parts: Callable[..., Any]) -> Callable[..., Any]:
        DECOMPOSITIONS[name] = parts
        return parts

    return register
