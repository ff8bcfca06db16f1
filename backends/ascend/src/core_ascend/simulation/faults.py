"""What a simulated NPU raises where the real one would refuse a call, or compute nonsense."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["NpuFault", "need", "need_contiguous", "need_lists", "need_types"]


class NpuFault(RuntimeError):
    """A call was made in a way that its documentation excludes."""


def need(ok: bool, what: str) -> None:
    """Raises NpuFault unless `ok`."""
    if not ok:
        raise NpuFault(what)


def need_contiguous(call: str, **tensors: Tensor | None) -> None:
    """Every tensor is contiguous."""
    for name, tensor in tensors.items():
        need(tensor is None or tensor.is_contiguous(), f"{call}: {name} is not contiguous")


def need_types(call: str, known: frozenset[torch.dtype], **tensors: Tensor | None) -> None:
    """Every tensor has the same element type, one of the known ones."""
    found = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    need(len(set(found.values())) <= 1, f"{call}: element types differ ({found})")
    for name, dtype in found.items():
        need(dtype in known, f"{call}: {name} is {dtype}, which the chip does not take there")


def need_lists(call: str, ends: list[int] | None, lens: list[int] | None, tokens: int) -> tuple[list[int], list[int]]:
    """Cumulative query lengths whose last one is `tokens`, and as many key lengths."""
    need(isinstance(ends, list) and isinstance(lens, list), f"{call}: lengths must be lists on the host")
    assert ends is not None and lens is not None
    need(len(ends) == len(lens) and len(ends) > 0, f"{call}: {len(ends)} query lengths, {len(lens)} key lengths")
    need(all(a <= b for a, b in itertools.pairwise(ends)), f"{call}: query lengths must be cumulative: {ends}")
    need(ends[-1] == tokens, f"{call}: the last cumulative length is {ends[-1]}, the query has {tokens} tokens")
    need(min(lens) >= 0, f"{call}: negative key length")
    return ends, lens
