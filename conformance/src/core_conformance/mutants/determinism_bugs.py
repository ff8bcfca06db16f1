"""Kernels whose last bit depends on what the determinism class that they declare says it may not depend on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import Determinism
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.variant import Mutant
from core_conformance.subject import oracle

__all__ = ["MUTANTS"]

_WRITTEN = {
    "advance": "token_ids",
    "apply_token_bitmask": "logits",
    "lora_add_": "y",
}
"""What an operation writes that returns nothing."""
_OPERATIONS = (
    *_WRITTEN,
    *("act_mul", "attention", "conv1d", "embed", "experts", "gated_delta", "index_topk", "linear", "merge_lse", "mla"),
    *("reduce_norm", "rejection_sample", "rms_norm", "rope", "route", "sample", "ssd"),
)


def _other_bit(x: Tensor) -> None:
    """Turns the last bit of the first element."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if x.numel():
        x.view(kinds[x.element_size()]).flatten()[:1].bitwise_xor_(1)


def _turned(name: str, when: Callable[[Tensor], bool]) -> Maker:
    """The reference, with another last bit in its first result where `when` says so of it."""

    def make(op: Any) -> Callable[[Any], Any]:
        honest = oracle(op)

        def run(args: Any) -> Any:
            out = honest(args)
            first = getattr(args, _WRITTEN[name]) if name in _WRITTEN else out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor) and first.is_contiguous() and when(first):
                _other_bit(first)
            return out

        return run

    return make


_calls = itertools.count()


def _every_other_call(result: Tensor) -> bool:
    return next(_calls) % 2 == 1


def _among_others(result: Tensor) -> bool:
    return len(result) > 1


def _declares(name: str, determinism: Determinism, when: Callable[[Tensor], bool]) -> Mutant:
    makers = {operation: _turned(operation, when) for operation in _OPERATIONS}
    return Mutant(name=name, level="L1", first="L1/determinism", makers=makers, determinism=determinism)


MUTANTS: tuple[Mutant, ...] = (
    _declares("last bit differs from call to call", Determinism.D1, _every_other_call),
    _declares("last bit shows whether a row is alone", Determinism.D2, _among_others),
)
