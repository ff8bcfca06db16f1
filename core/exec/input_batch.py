"""The runner's mirror of its requests, and the arrays of a step made from it.

Every request has a row in persistent arrays; a step gathers the rows that are scheduled. All index math is vectorised
on the host and copied to the device once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend import Batch, GroupBatch
from core.exec.device_copies import DeviceCopies
from core.kv.groups import KVCacheGroup
from core.sampling_params import SamplingParams
from core.sched.output import NewRequest, ScheduledRequest

__all__ = ["InputBatch", "RequestState", "StepInputs"]

Int32Array = npt.NDArray[np.int32]

_NONCE = os.urandom(16)


class RequestState:
    """What the runner knows of one request.

    Attributes:
        row: Row in the persistent arrays of `InputBatch`.
        num_tokens: Tokens known to the host; one more may be pending on the device.
        seed: Key of the request's random numbers, as int64; stays the same when a preempted request comes back.
    """

    __slots__ = ("num_prompt_tokens", "num_tokens", "params", "request_id", "row", "seed")

    def __init__(self, request: NewRequest, row: int) -> None:
        self.request_id = request.request_id
        self.row = row
        self.params: SamplingParams = request.sampling_params
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_tokens = len(request.token_ids)
        self.seed = _seed(request)


def _seed(request: NewRequest) -> int:
    seed = request.sampling_params.seed
    if seed is None:
        # A fresh seed for each request of this process, and the same one after a preemption.
        seed = int.from_bytes(hashlib.sha256(_NONCE + request.request_id.encode()).digest()[:8], "little")
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """A step's batch and where its rows belong.

    Args:
        batch: What the model gets.
        states: Requests in the order of the batch.
        scheduled: Their shares of the step.
        positions: [T], the batch's positions on the host.
        sample_indices: For each row of `batch.logits_indices` the request's position in `states`. A request that
            samples has one row, and one more for each of its drafts: what follows its last known token comes first.
        sample_positions: For each of these rows the position of the token to be drawn.
    """

    batch: Batch
    states: list[RequestState]
    scheduled: Sequence[ScheduledRequest]
    positions: Int32Array
    sample_indices: list[int]
    sample_positions: list[int]


class InputBatch:
    """Persistent arrays of all requests that the runner knows.

    Args:
        max_num_seqs: Rows; one more is kept for a request that comes while another is leaving.
        groups: Cache groups, in the order of `NewRequest.block_ids`.
        block_size: Tokens a block.
        copies: Brings batches to the device.
    """

    def __init__(
        self, max_num_seqs: int, groups: Sequence[KVCacheGroup], block_size: int, copies: DeviceCopies
    ) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._to_device = copies.put
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._tokens: Int32Array = np.zeros((max_num_seqs, 256), dtype=np.int32)
        self._tables: list[Int32Array] = [np.zeros((max_num_seqs, 16), dtype=np.int32) for _ in self._groups]
        self._table_lens: Int32Array = np.zeros((len(self._groups), max_num_seqs), dtype=np.int32)
        self.last_sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=copies.device)
        """[rows], int32, device: newest token of each row, possibly not known to the host yet."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._states

    def __getitem__(self, request_id: str) -> RequestState:
        return self._states[request_id]

    def get(self, request_id: str) -> RequestState | None:
        """The request's state, or None where it was dropped."""
        return self._states.get(request_id)

    def add(self, request: NewRequest) -> None:
        """Takes up a request; its tokens and block table replace whatever the row held."""
        assert request.request_id not in self._states, f"{request.request_id} is known already"
        if not self._free_rows:
            self._add_rows()
        state = RequestState(request, self._free_rows.pop())
        self._states[request.request_id] = state
        self._reserve_tokens(len(request.token_ids))
        self._tokens[state.row, : state.num_tokens] = request.token_ids
        for index, ids in enumerate(request.block_ids):
            self._table_lens[index, state.row] = 0
            self._append_blocks(index, state.row, ids)

    def drop(self, request_id: str) -> None:
        """Forgets a request; unknown ids are ignored (it may have been dropped before it ever ran)."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._free_rows.append(state.row)

    def append_blocks(self, entry: ScheduledRequest) -> None:
        """Adds the blocks that the request gained in this step."""
        row = self._states[entry.request_id].row
        for index, ids in enumerate(entry.new_block_ids):
            if ids:
                self._append_blocks(index, row, ids)

    def append_tokens(self, state: RequestState, token_ids: Sequence[int]) -> None:
        """Writes down tokens that the host has learned. Ignored where the request was dropped since."""
        if self._states.get(state.request_id) is not state:
            return
        end = state.num_tokens + len(token_ids)
        self._reserve_tokens(end)
        self._tokens[state.row, state.num_tokens : end] = token_ids
        state.num_tokens = end

    def tokens(self, state: RequestState) -> Int32Array:
        """The request's known tokens; a view."""
        return self._tokens[state.row, : state.num_tokens]

    def tokens_before(self, state: RequestState, position: int) -> Int32Array:
        """Tokens [0, position): the known ones and, in a step that verifies drafts, of these the first; a view."""
        return self._tokens[state.row, :position]

    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> StepInputs:
        """The batch of a step. Draft tokens are written behind the known ones first."""
        states = [self._states[entry.request_id] for entry in scheduled]
        for state, entry in zip(states, scheduled, strict=True):
            self._write_drafts(state, entry)
        rows = np.fromiter((state.row for state in states), dtype=np.int32, count=len(states))
        computed = np.fromiter((entry.num_computed_tokens for entry in scheduled), dtype=np.int32, count=len(states))
        counts = np.fromiter((entry.num_scheduled_tokens for entry in scheduled), dtype=np.int32, count=len(states))
        starts = np.zeros(len(states) + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(np.arange(len(states), dtype=np.int32), counts)
        positions = np.arange(starts[-1], dtype=np.int32) - starts[owner] + computed[owner]
        sample_tokens = _sample_tokens(scheduled, starts)
        batch = Batch(
            num_reqs=len(states),
            num_tokens=int(starts[-1]),
            num_decodes=int(np.count_nonzero(counts == 1)),
            max_query_len=int(counts.max(initial=0)),
            token_ids=self._token_ids(states, scheduled, rows, owner, positions),
            positions=self._to_device(positions),
            query_start_loc=self._to_device(starts),
            query_start_loc_host=starts.tolist(),
            num_valid_tokens=self._to_device(starts[-1:].copy()),
            groups=tuple(
                self._group_batch(index, rows, owner, positions, computed, counts) for index in range(len(self._groups))
            ),
            logits_indices=self._to_device(sample_tokens),
        )
        return StepInputs(
            batch=batch,
            states=states,
            scheduled=scheduled,
            positions=positions,
            sample_indices=owner[sample_tokens].tolist(),
            sample_positions=(positions[sample_tokens] + 1).tolist(),
        )

    def _token_ids(
        self,
        states: Sequence[RequestState],
        scheduled: Sequence[ScheduledRequest],
        rows: Int32Array,
        owner: Int32Array,
        positions: Int32Array,
    ) -> Tensor:
        self._reserve_tokens(int(positions.max(initial=0)) + 1)
        token_ids = self._to_device(self._tokens[rows[owner], positions])
        known = np.fromiter((state.num_tokens for state in states), dtype=np.int32, count=len(states))
        drafts = np.fromiter(
            (e.num_computed_tokens + e.num_scheduled_tokens - len(e.draft_token_ids) for e in scheduled),
            dtype=np.int32,
            count=len(states),
        )
        pending = np.flatnonzero((positions >= known[owner]) & (positions < drafts[owner]))
        if pending.size:
            # Tokens that the previous step sampled and the host has not seen: they go from device to device.
            where, source = self._to_device(pending), self._to_device(rows[owner[pending]])
            token_ids[where] = self.last_sampled[source]
        return token_ids

    def _group_batch(
        self,
        index: int,
        rows: Int32Array,
        owner: Int32Array,
        positions: Int32Array,
        computed: Int32Array,
        counts: Int32Array,
    ) -> GroupBatch:
        seq_lens = computed + counts
        width = max(1, -(-int(seq_lens.max(initial=1)) // self._block_size))
        self._reserve_blocks(index, width)
        table = self._tables[index][rows, :width]
        blocks = table[owner, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        self._hide_unread(table, index, seq_lens, computed)
        return GroupBatch(
            block_table=self._to_device(table),
            slots=self._to_device(slots.astype(np.int32, copy=False)),
            seq_lens=self._to_device(seq_lens),
            seq_lens_host=seq_lens.tolist(),
        )

    def _hide_unread(self, table: Int32Array, index: int, seq_lens: Int32Array, computed: Int32Array) -> None:
        """Names the null block where nothing may be read: past the end and before the window of the first query."""
        columns = np.arange(table.shape[1], dtype=np.int32)
        table[columns * self._block_size >= seq_lens[:, None]] = 0
        window = self._groups[index].window
        if window:
            first_key = np.maximum(computed - window + 1, 0)
            table[columns < (first_key // self._block_size)[:, None]] = 0

    def _write_drafts(self, state: RequestState, entry: ScheduledRequest) -> None:
        if entry.draft_token_ids:
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            self._reserve_tokens(end)
            self._tokens[state.row, end - len(entry.draft_token_ids) : end] = entry.draft_token_ids

    def _append_blocks(self, index: int, row: int, ids: Sequence[int]) -> None:
        start = int(self._table_lens[index, row])
        self._reserve_blocks(index, start + len(ids))
        self._tables[index][row, start : start + len(ids)] = ids
        self._table_lens[index, row] = start + len(ids)

    def _reserve_tokens(self, length: int) -> None:
        if length > self._tokens.shape[1]:
            self._tokens = _widen(self._tokens, length)

    def _reserve_blocks(self, index: int, length: int) -> None:
        if length > self._tables[index].shape[1]:
            self._tables[index] = _widen(self._tables[index], length)

    def _add_rows(self) -> None:
        """Doubles the rows; the scheduler's bound keeps this rare."""
        old = self._tokens.shape[0]
        self._free_rows = list(range(2 * old - 1, old - 1, -1))
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tables = [np.concatenate([table, np.zeros_like(table)]) for table in self._tables]
        self._table_lens = np.concatenate([self._table_lens, np.zeros_like(self._table_lens)], axis=1)
        self.last_sampled = torch.cat([self.last_sampled, torch.zeros_like(self.last_sampled)])


def _sample_tokens(scheduled: Sequence[ScheduledRequest], starts: Int32Array) -> Int32Array:
    """Tokens of the batch whose logits are sampled: of each request that samples the last one, and its drafts."""
    ends = starts[1:][[entry.samples for entry in scheduled]]
    drafts = [len(entry.draft_token_ids) for entry in scheduled if entry.samples]
    if not any(drafts):
        return ends - 1
    parts = [np.arange(end - 1 - count, end, dtype=np.int32) for end, count in zip(ends, drafts, strict=True)]
    return np.concatenate(parts)


def _widen(array: Int32Array, length: int) -> Int32Array:
    wider = np.zeros((array.shape[0], max(length, 2 * array.shape[1])), dtype=np.int32)
    wider[:, : array.shape[1]] = array
    return wider
