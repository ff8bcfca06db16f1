"""Operation name to the maker of its callable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.backend.ops import OpSpec
from core_ascend.chips import Chip
from core_ascend.ops import attention, cache, dense, experts, latent, linear, recurrent

__all__ = ["make"]

Maker = Callable[[Any, Chip], Callable[[Any], Any]]


def _of(maker: Callable[[Any], Callable[[Any], Any]]) -> Maker:
    return lambda op, chip: maker(op)


_MAKERS: dict[str, Maker] = {
    "act_mul": _of(dense.act_mul),
    "attention": attention.attention,
    "embed": _of(dense.embed),
    "experts": _of(experts.experts),
    "export_blocks": _of(cache.export_blocks),
    "gated_delta": _of(recurrent.gated_delta),
    "import_blocks": _of(cache.import_blocks),
    "index_topk": _of(latent.index_topk),
    "kv_write": cache.kv_write,
    "linear": _of(linear.linear),
    "mla": _of(latent.mla),
    "mla_prolog": _of(latent.mla_prolog),
    "move_tokens": _of(cache.move_tokens),
    "reduce_norm": _of(dense.reduce_norm),
    "rms_norm": _of(dense.rms_norm),
    "rope": _of(dense.rope),
    "route": _of(experts.route),
}


def make(op: OpSpec, chip: Chip) -> Callable[[Any], Any]:
    """The callable of an operation that `rules` calls NATIVE; it takes the operation's record."""
    return _MAKERS[op.name](op, chip)
