"""What the calls need to know of a step: exact host lists, where tokens are written, which rows are padding."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.backend import Batch, GroupSpec, Plan
from core_ascend.layouts import is_latent
from core_ascend.limits import MASK_SIZE, MAX_PIECE

__all__ = ["AscendPlan", "ascend_plan", "causal_mask"]


@dataclass(slots=True, kw_only=True)
class AscendPlan(Plan):
    """A plan with the lists that the calls are launched with.

    Args:
        query_ends: Cumulative query lengths; the last one is T.
        kv_lens: Keys of each request, exact.
        maybe_padded: Whether a token may have no slot; False only where no request can be padding.
        always_padded: Whether `maybe_padded` stays, as it does once the plan was captured.
        rows: [T], int64: which token's key and value each line of a write stores.
        targets: [T], int32: where it goes; a token without a slot repeats the first write that there is.
        any_target: [1], bool: whether any token has a slot.
        padding: [T, 1, 1], bool: rows past the last valid token.
        piece_ends: Query lengths of latent attention, cumulative; no piece is longer than MAX_PIECE.
        piece_lens: Keys that the last query of each piece sees.
        piece_table: [pieces, max_blocks], int32: block table of each piece; None where no cache is latent.
    """

    query_ends: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)
    maybe_padded: bool = True
    always_padded: bool = False
    rows: Tensor | None = None
    targets: Tensor | None = None
    any_target: Tensor | None = None
    padding: Tensor | None = None
    piece_ends: list[int] = field(default_factory=list)
    piece_lens: list[int] = field(default_factory=list)
    piece_table: Tensor | None = None


@functools.cache
def causal_mask(device: torch.device) -> Tensor:
    """[2048, 2048], int8, 1 above the diagonal: how the call wants "causal" said. One a device, never moved."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.int8, device=device).triu_(1)


def ascend_plan(batch: Batch, group: GroupSpec, into: Plan | None) -> AscendPlan:
    """The plan of one cache group; with `into` its tensors stay where they are."""
    part = batch.groups[group.index]
    assert part.host_exact, "the attention call takes exact lengths from the host, and these are bounds"
    if into is None:
        into = AscendPlan(batch=batch, group=part, spec=group, block_size=group.layout.block_size)
    assert isinstance(into, AscendPlan), "a plan is refreshed by the backend that made it"
    into.batch, into.group = batch, part
    starts = [int(start) for start in batch.query_start_loc_host]
    into.query_ends, into.kv_lens = starts[1:], [int(length) for length in part.seq_lens_host]
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    # A padding request has as many keys as queries, and so has a whole prompt: the host cannot tell them apart.
    equal = any(count == kv for count, kv in zip(lengths, into.kv_lens, strict=True))
    into.maybe_padded = into.always_padded or equal
    if batch.num_tokens:
        _place_writes(into)
    if is_latent(group.layout):
        _cut_pieces(into, starts, lengths)
    return into


def _place_writes(plan: AscendPlan) -> None:
    slots = plan.slots
    valid = slots >= 0
    index = torch.arange(len(slots), device=slots.device)
    rows = torch.where(valid, index, valid.int().argmax())
    plan.rows = _kept(plan.rows, rows)
    plan.targets = _kept(plan.targets, slots.index_select(0, rows).clamp_(min=0))
    plan.any_target = _kept(plan.any_target, valid.any().view(1))
    plan.padding = _kept(plan.padding, (index >= plan.batch.num_valid_tokens).view(-1, 1, 1))


def _cut_pieces(plan: AscendPlan, starts: list[int], lengths: list[int]) -> None:
    """Queries [a, a + MAX_PIECE) of a request with n more behind them see n keys fewer than the whole request."""
    requests: list[int] = []
    plan.piece_ends, plan.piece_lens = [], []
    for request, (start, count, kv_len) in enumerate(zip(starts, lengths, plan.kv_lens, strict=False)):
        for first in range(0, count, MAX_PIECE):
            last = min(first + MAX_PIECE, count)
            requests.append(request)
            plan.piece_ends.append(start + last)
            plan.piece_lens.append(kv_len - (count - last))
    table = plan.block_table
    if requests != list(range(len(table))):
        table = table.index_select(0, torch.tensor(requests, device=table.device, dtype=torch.int64))
    plan.piece_table = _kept(plan.piece_table, table)


def _kept(old: Tensor | None, new: Tensor) -> Tensor:
    """`new`, in the memory of `old` where that has its shape: a captured graph reads it there."""
    if old is None or old.shape != new.shape:
        return new
    if old.data_ptr() != new.data_ptr():
        old.copy_(new)
    return old
