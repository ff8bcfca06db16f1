"""The runner's mirror of its requests, and the arrays of a step made from it.

Every request has a row in persistent arrays; a step gathers the rows that are scheduled. All index math is vectorised
on the host and copied to the device once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.backend import Batch
from core.exec.device_copies import DeviceCopies
from core.exec.request_state import RequestState
from core.exec.sampler import SampledRows, SamplingRow
from core.exec.step_arrays import StepArrays, make_batch
from core.kv.groups import KVCacheGroup
from core.sched.output import NewRequest, ScheduledRequest

__all__ = ["InputBatch", "StepInputs"]

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """A step's batch and where its rows belong.

    Args:
        batch: What the model gets.
        states: Requests in the order of the batch.
        scheduled: Their shares of the step.
        sampling: Requests that sample, in the same order.
        draft_token_ids: Drafts of each of these.
        sample_indices: For each row of logits the request's position in `states`. A request that samples has one row,
            and one more for each of its drafts: what follows its last known token comes first.
        sample_positions: For each of these rows the position of the token to be drawn.
        mirror_rows: For each of these rows its request's in the mirror.
        logits_rows: For each of these rows that of the hidden states, for indexing.
        sampling_rows: The same rows as the sampler takes them; empty until it is asked.
        positions: `sample_positions` on the device, where they lie there already.
    """

    batch: Batch
    states: list[RequestState]
    scheduled: Sequence[ScheduledRequest]
    sampling: list[RequestState]
    draft_token_ids: list[Sequence[int]]
    sample_indices: list[int]
    sample_positions: list[int]
    mirror_rows: npt.NDArray[np.intp]
    logits_rows: slice | Tensor
    sampling_rows: list[SamplingRow] = field(default_factory=list)
    positions: Tensor | None = None


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
        self.block_size = block_size
        self.windows = tuple(group.window for group in groups)
        """Of each cache group, tokens that a query may see; 0 for all."""
        self._copies = copies
        self._states: dict[str, RequestState] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._tokens: Int32Array = np.zeros((max_num_seqs, 256), dtype=np.int32)
        self._tables: list[Int32Array] = [np.zeros((max_num_seqs, 16), dtype=np.int32) for _ in groups]
        self._table_lens: Int32Array = np.zeros((len(groups), max_num_seqs), dtype=np.int32)
        self._iota = np.arange(256, dtype=np.int32)
        self._last_sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=copies.device)
        """[rows], device: newest token of each row, possibly not known to the host yet."""
        self._last_on_host = copies.host_view(self._last_sampled)
        self._newest: tuple[npt.NDArray[np.intp], SampledRows] | None = None
        """Rows and tokens that `_last_sampled` lacks: the next step often has the same rows and asks for no others."""

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
        state.unwritten += token_ids
        state.num_tokens += len(token_ids)

    def tokens(self, state: RequestState) -> Int32Array:
        """The request's known tokens; a view."""
        return self.tokens_before(state, state.num_tokens)

    def tokens_before(self, state: RequestState, position: int) -> Int32Array:
        """Tokens [0, position): the known ones and, in a step that verifies drafts, of these the first; a view."""
        self._write_tokens(state)
        return self._tokens[state.row, :position]

    def prepare(
        self,
        scheduled: Sequence[ScheduledRequest],
        put: Callable[[StepArrays], Batch] | None = None,
        *,
        spread: bool = False,
    ) -> StepInputs:
        """The batch of a step. Draft tokens are written behind the known ones first.

        Args:
            put: Brings the step's arrays into the storage of a recorded step; None makes tensors for this step.
            spread: Whether each token becomes a row of the batch, as if it were a request of its own.
        """
        states = [self._states[entry.request_id] for entry in scheduled]
        for state, entry in zip(states, scheduled, strict=True):
            self._write_tokens(state)
            if entry.draft_token_ids:
                self._write_drafts(state, entry)
        rows = np.array([state.row for state in states], dtype=np.int32)
        computed = np.array([entry.num_computed_tokens for entry in scheduled], dtype=np.int32)
        counts = np.array([entry.num_scheduled_tokens for entry in scheduled], dtype=np.int32)
        owner, starts, positions = self._lay_out(computed, counts)
        token_ids, pending = self._token_ids(states, scheduled, rows, owner, positions)
        sample_tokens = _sample_tokens(scheduled, starts)
        seq_lens = computed + counts
        if spread and len(positions) != len(counts):
            seq_lens, row_starts = positions + 1, self._iota[: len(positions) + 1]
            counts = np.ones(len(positions), dtype=np.int32)
            tables, slots = self._blocks(rows[owner], row_starts[:-1], positions, positions, seq_lens)
        else:
            row_starts = starts
            tables, slots = self._blocks(rows, owner, positions, computed, seq_lens)
        arrays = StepArrays(
            token_ids=token_ids,
            positions=positions,
            counts=counts,
            starts=row_starts,
            seq_lens=seq_lens,
            tables=tables,
            slots=slots,
            logits_rows=sample_tokens,
        )
        batch = make_batch(arrays, self._copies) if put is None else put(arrays)
        self._fill_pending(batch.token_ids, rows, owner, pending)
        sampled = owner[sample_tokens]
        return StepInputs(
            batch=batch,
            states=states,
            scheduled=scheduled,
            sampling=[state for state, entry in zip(states, scheduled, strict=True) if entry.samples],
            draft_token_ids=[entry.draft_token_ids for entry in scheduled if entry.samples],
            sample_indices=sampled.tolist(),
            sample_positions=(positions[sample_tokens] + 1).tolist(),
            mirror_rows=rows[sampled].astype(np.intp),
            logits_rows=self._logits_rows(arrays, batch, recorded=put is not None),
        )

    def keep_sampled(self, mirror_rows: npt.NDArray[np.intp], sampled: SampledRows) -> None:
        """Writes down on the device what was sampled, for the steps that follow before the host knows it.

        Args:
            mirror_rows: As in `StepInputs`.
            sampled: As many rows.
        """
        if self._copies.in_place:
            sampled.on_host = sampled.token_ids.tolist()
        if self._newest is not None and self._newest[0] is not mirror_rows:
            self._write_newest()
        self._newest = mirror_rows, sampled

    def sampled(self, mirror_rows: npt.NDArray[np.intp]) -> list[int]:
        """What the step before sampled for these rows and no others, where the host knows it at once."""
        assert self._newest is not None and self._newest[0] is mirror_rows, "another step was sampled since"
        on_host = self._newest[1].on_host
        assert on_host is not None, "the device computes while the host goes on"
        return on_host

    def block_id(self, group: int, state: RequestState, column: int) -> int:
        """The block of a request in a column of its table."""
        return int(self._tables[group][state.row, column])

    def _lay_out(self, computed: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array]:
        """(request of each token, first token of each request, position of each token)."""
        num_reqs, num_tokens = len(counts), int(counts.sum())
        if max(num_reqs, num_tokens) >= len(self._iota):
            self._iota = np.arange(2 * max(num_reqs, num_tokens), dtype=np.int32)
        if num_tokens == num_reqs:  # one token each: nobody has none
            return self._iota[:num_reqs], self._iota[: num_reqs + 1], computed
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(counts, out=starts[1:])
        owner = np.repeat(self._iota[:num_reqs], counts)
        return owner, starts, self._iota[:num_tokens] - starts[owner] + computed[owner]

    def _token_ids(
        self,
        states: Sequence[RequestState],
        scheduled: Sequence[ScheduledRequest],
        rows: Int32Array,
        owner: Int32Array,
        positions: Int32Array,
    ) -> tuple[Int32Array, npt.NDArray[np.intp]]:
        """Tokens that the host knows, and the indices of those that only the device knows."""
        self._reserve_tokens(int(positions.max(initial=0)) + 1)
        known = np.array([state.num_tokens for state in states], dtype=np.int32)
        drafts = np.array(
            [e.num_computed_tokens + e.num_scheduled_tokens - len(e.draft_token_ids) for e in scheduled], dtype=np.int32
        )
        pending = np.flatnonzero((positions >= known[owner]) & (positions < drafts[owner]))
        return self._tokens[rows[owner], positions], pending

    def _fill_pending(
        self, token_ids: Tensor, rows: Int32Array, owner: Int32Array, pending: npt.NDArray[np.intp]
    ) -> None:
        """Tokens that the previous step sampled and the host has not seen: they go from device to device."""
        self._write_newest()  # in any case: the next step may sample into the same memory
        if not pending.size:
            return
        source = rows[owner[pending]]
        if self._copies.in_place:
            token_ids.numpy()[pending] = self._last_on_host[source]
        else:
            token_ids[self._copies.put(pending)] = self._last_sampled[self._copies.put(source)]

    def _write_newest(self) -> None:
        if self._newest is None:
            return
        (mirror_rows, sampled), self._newest = self._newest, None
        if sampled.on_host is not None:
            self._last_on_host[mirror_rows] = sampled.on_host
        else:
            self._last_sampled.index_copy_(0, self._copies.put(mirror_rows), sampled.token_ids)

    def _logits_rows(self, arrays: StepArrays, batch: Batch, *, recorded: bool) -> slice | Tensor:
        if len(arrays.logits_rows) == len(arrays.positions):  # every token's
            return slice(len(arrays.positions))
        return self._copies.put(arrays.logits_rows) if recorded else batch.logits_indices

    def _blocks(
        self, rows: Int32Array, owner: Int32Array, positions: Int32Array, computed: Int32Array, seq_lens: Int32Array
    ) -> tuple[list[Int32Array], list[Int32Array]]:
        """Block table and slots of each cache group."""
        width = max(1, -(-int(seq_lens.max(initial=1)) // self.block_size))
        columns, offsets = np.divmod(positions, self.block_size)
        tables, slots = [], []
        for index in range(len(self._tables)):
            self._reserve_blocks(index, width)
            table = self._tables[index][rows, :width]
            slots.append((table[owner, columns] * self.block_size + offsets).astype(np.int32, copy=False))
            self._hide_unread(table, index, seq_lens, computed)
            tables.append(table)
        return tables, slots

    def _hide_unread(self, table: Int32Array, index: int, seq_lens: Int32Array, computed: Int32Array) -> None:
        """Names the null block where nothing may be read: past the end and before the window of the first query."""
        columns = np.arange(table.shape[1], dtype=np.int32)
        table[columns * self.block_size >= seq_lens[:, None]] = 0
        window = self.windows[index]
        if window:
            first_key = np.maximum(computed - window + 1, 0)
            table[columns < (first_key // self.block_size)[:, None]] = 0

    def _write_drafts(self, state: RequestState, entry: ScheduledRequest) -> None:
        end = entry.num_computed_tokens + entry.num_scheduled_tokens
        self._reserve_tokens(end)
        self._tokens[state.row, end - len(entry.draft_token_ids) : end] = entry.draft_token_ids

    def _append_blocks(self, index: int, row: int, ids: Sequence[int]) -> None:
        start = int(self._table_lens[index, row])
        self._reserve_blocks(index, start + len(ids))
        self._tables[index][row, start : start + len(ids)] = ids
        self._table_lens[index, row] = start + len(ids)

    def _write_tokens(self, state: RequestState) -> None:
        if state.unwritten:
            self._reserve_tokens(state.num_tokens)
            self._tokens[state.row, state.num_tokens - len(state.unwritten) : state.num_tokens] = state.unwritten
            state.unwritten.clear()

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
        self._last_sampled = torch.cat([self._last_sampled, torch.zeros_like(self._last_sampled)])
        self._last_on_host = self._copies.host_view(self._last_sampled)


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
