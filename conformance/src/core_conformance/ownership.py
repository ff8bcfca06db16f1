"""Who may write which tensor of a record: all others are read-only, and every call of a check is watched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed, Plan, Quantized
from core.backend.ops import OpSpec

__all__ = ["WRITABLE", "guarded"]

WRITABLE: dict[str, frozenset[str]] = {
    "advance": frozenset({"token_ids", "positions", "seq_lens", "slots"}),
    "apply_token_bitmask": frozenset({"logits"}),
    "attention": frozenset({"lse"}),
    "conv1d": frozenset({"cache"}),
    "gated_delta": frozenset({"cache"}),
    "import_blocks": frozenset({"cache"}),
    "kv_write": frozenset({"cache"}),
    "lora_add_": frozenset({"y"}),
    "mla": frozenset({"lse"}),
    "mla_prolog": frozenset({"q", "kv", "cache"}),
    "move_tokens": frozenset({"cache"}),
    "qk_norm_rope_write": frozenset({"query", "key", "cache"}),
    "reduce_norm": frozenset({"partial", "residual"}),
    "rms_norm": frozenset({"residual"}),
    "rope": frozenset({"query", "key"}),
    "sample": frozenset({"logits"}),
    "ssd": frozenset({"cache"}),
}
"""Operation to the fields that the contract lets it write or overwrite; operations that are not named have none."""


def guarded(
    op: OpSpec, fn: Callable[[Any], Any], get: Callable[[Tensor], Tensor], error: type[Exception]
) -> Callable[[Any], Any]:
    """`fn`, which then raises `error` where a call changed a tensor that it may only read.

    Args:
        op: Whose record `fn` takes.
        get: Brings a copy of a device tensor to the host.
    """

    def call(args: Any) -> Any:
        before = [(name, x, get(_bits(x))) for name, x in _read_only(op, args)]
        result = fn(args)
        for name, x, old in before:
            if not torch.equal(get(_bits(x)), old):
                raise error(f"{op.describe()}: it wrote to {name!r}, which it may only read")
        return result

    return call


def _read_only(op: OpSpec, args: Any) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of the record that the operation must leave as they are, those of weights and plan included."""
    for field in dataclasses.fields(args):
        if field.name not in WRITABLE.get(op.name, ()):
            yield from _tensors(field.name, getattr(args, field.name))


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)
    elif isinstance(value, Quantized):
        yield from ((f"{name}.q", value.q), (f"{name}.scale", value.scale))
    elif isinstance(value, Packed):
        for part, tensor in value.tensors().items():
            yield from _tensors(f"{name}.{part}", tensor)
    elif isinstance(value, Plan):
        for part in ("block_table", "slots", "seq_lens", "query_start_loc"):
            yield from _tensors(f"{name}.{part}", getattr(value, part))


def _bits(x: Tensor) -> Tensor:
    """The same bits as integers, so that NaN equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x if x.dtype is torch.bool else x.view(sizes[x.element_size()])
