"""Every mutant with the level that must kill it, and every honest variant with the levels that must pass it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from core_conformance.mutants import engine_bugs, kernels
from core_conformance.mutants.backend import Maker

__all__ = ["HONEST", "MUTANTS", "Mutant"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug, or one honest difference, over the reference backend.

    Args:
        name: A few words.
        level: Level that must kill it; for an honest variant the level that must pass it.
        makers: Operations that it does itself.
        bug: Context in which the engine is wrong.
        first: Head of the ids that should kill it, which run first; all others of the level run behind them.
    """

    name: str
    level: str
    first: str
    makers: Mapping[str, Maker] = field(default_factory=dict)
    bug: Callable[[], AbstractContextManager[Any]] = nullcontext


def _kernel(name: str, operation: str, maker: Maker) -> Mutant:
    return Mutant(name=name, level="L1", first=f"L1/{operation}", makers={operation: maker})


def _engine(name: str, first: str, bug: Callable[[], AbstractContextManager[Any]]) -> Mutant:
    return Mutant(name=name, level="L3", first=first, bug=bug)


def _window_plus_one(op: Any) -> int:
    return op.window + 1 if op.window else 0


MUTANTS: tuple[Mutant, ...] = (
    _kernel("softmax scale 1.01", "attention", kernels.changed_op("attention", scale=lambda op: op.scale * 1.01)),
    _kernel("last key skipped", "attention", kernels.attention_with(-1)),
    _kernel("one extra key", "attention", kernels.attention_with(1)),
    _kernel("head map transposed", "attention", kernels.head_map_transposed),
    _kernel("window off by one", "attention", kernels.changed_op("attention", window=_window_plus_one)),
    _kernel("rope off by one", "rope", kernels.rope_off_by_one),
    _kernel("norm without eps", "rms_norm", kernels.changed_op("rms_norm", eps=lambda op: 0.0)),
    _kernel("K tail dropped", "linear", kernels.linear_drops_tail),
    _kernel("-1 slot written to slot 0", "kv_write", kernels.minus_one_to_slot_zero),
    _engine("prefix hash ignores the parent", "L3/prefix-cache/parent", engine_bugs.hash_ignores_parent),
    _engine("prefix hash ignores the salt", "L3/prefix-cache/salt", engine_bugs.hash_ignores_salt),
    _engine("full hit skips the last token", "L3/prefix-cache/full", engine_bugs.full_hit_skips_the_last_token),
    _engine("block freed while referenced", "L3/prefix-cache/shared", engine_bugs.block_freed_while_referenced),
    _engine("resumed with stale num_computed_tokens", "L3/preemption", engine_bugs.resumed_with_stale_count),
    _engine("abort leaks a block", "L3/abort", engine_bugs.abort_leaks_a_block),
    _engine("swapped in to the wrong blocks", "L3/preemption/swap", engine_bugs.swapped_in_elsewhere),
)
"""Each must fail its level."""

HONEST: tuple[Mutant, ...] = (
    _kernel("split-K sums", "linear", kernels.split_k_linear(4)),
    _kernel("P in half precision", "attention", kernels.blocked_attention(1 << 20, half_weights=True)),
    _kernel("other tile order", "attention", kernels.blocked_attention(7, half_weights=False)),
)
"""Each must pass its level: what differs is where it rounds."""
