"""What a step looks like to a backend: `Batch`, its cache groups, and the `Plan` made of them once a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from core.backend.layout import KVLayout
    from core.backend.ops.spec import OpSpec

__all__ = ["Batch", "GroupBatch", "GroupSpec", "Plan"]


@dataclass(slots=True, kw_only=True)
class GroupBatch:
    """The part of a batch that belongs to one cache group. Groups differ in windows, so lengths are theirs.

    Args:
        block_table: [R, max_blocks], int32, device. Entries past a request's blocks, and those that fell out of a
            sliding window, are the null block 0 and must not be read.
        slots: [T], int32, device: block_id * block_size + offset for each token; -1 is written nowhere.
        seq_lens: [R], int32, device: keys of each request, those of this step included.
        seq_lens_host: The same on the host; an upper bound where `host_exact` is False.
        host_exact: Whether `seq_lens_host` is exact. True without speculation, also under asynchronous scheduling.
        state_slots: [R, 1 + K], int32, device: slots of STATE caches; position n-1 is read after n accepted tokens.
        num_accepted: [R], int32, device: tokens of the previous step that stayed; 0 starts from a zero state.
        checkpoint_slots: [R], int32, device: slots to which the state at the end of the step is copied; -1 none.
    """

    block_table: Tensor
    slots: Tensor
    seq_lens: Tensor
    seq_lens_host: Sequence[int]
    host_exact: bool = True
    state_slots: Tensor | None = None
    num_accepted: Tensor | None = None
    checkpoint_slots: Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step: R requests, T packed tokens, requests with the fewest tokens first (decodes lead).

    Padding rows of a replayed graph are real rows: query of the bucket's width, seq_len equal to it, null block 0,
    slot -1.

    Args:
        num_reqs: R, padding rows included.
        num_tokens: T, padding rows included.
        num_decodes: Leading requests with at most `1 + num_spec_tokens` tokens.
        max_query_len: Longest query.
        token_ids: [T], int32, device.
        positions: [T], int32, device.
        query_start_loc: [R + 1], int32, device: request r owns tokens [start[r], start[r + 1]).
        query_start_loc_host: The same on the host, exact.
        num_valid_tokens: [1], int32, device: tokens that are no padding.
        groups: One entry a cache group.
        logits_indices: [S], int32, device: rows of the hidden states whose logits are wanted.
        dp_num_tokens: Tokens of each data-parallel rank; None for one rank.
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    max_query_len: int
    token_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    query_start_loc_host: Sequence[int]
    num_valid_tokens: Tensor
    groups: tuple[GroupBatch, ...]
    logits_indices: Tensor
    dp_num_tokens: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What a plan must serve: the layout of the group's cache and the operations that will use the plan."""

    index: int
    layout: KVLayout
    ops: tuple[OpSpec, ...] = ()


@dataclass(slots=True, kw_only=True)
class Plan:
    """What the operations of one cache group need to know of a step. A backend may subclass it and add its own.

    Valid from `Backend.plan` until the next call of it for the group with `into=` this plan.

    Args:
        batch: The step.
        group: The group's part of it.
        spec: What was asked of the plan.
        block_size: Tokens a block.
    """

    batch: Batch
    group: GroupBatch
    spec: GroupSpec
    block_size: int = field(default=0)

    @property
    def query_start_loc(self) -> Tensor:
        """[R + 1], int32, device."""
        return self.batch.query_start_loc

    @property
    def seq_lens(self) -> Tensor:
        """[R], int32, device."""
        return self.group.seq_lens

    @property
    def block_table(self) -> Tensor:
        """[R, max_blocks], int32, device."""
        return self.group.block_table

    @property
    def slots(self) -> Tensor:
        """[T], int32, device."""
        return self.group.slots
