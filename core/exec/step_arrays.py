"""A step's numbers on the host, and two ways to a batch: tensors made for the step, or storage that a graph reads."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.backend import Batch, GroupBatch
from core.exec.device_copies import DeviceBuffer, DeviceCopies

__all__ = ["StepArrays", "StepBuffers", "make_batch"]

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """One step, int32, on the host.

    Args:
        token_ids: [T].
        positions: [T].
        counts: [R]: tokens of each request.
        starts: [R + 1]: first token of each request, and T.
        seq_lens: [R]: keys of each request, those of the step included.
        tables: One [R, width] a cache group, 0 where nothing may be read.
        slots: One [T] a cache group.
        logits_rows: [S]: tokens whose logits are wanted.
    """

    token_ids: Int32Array
    positions: Int32Array
    counts: Int32Array
    starts: Int32Array
    seq_lens: Int32Array
    tables: list[Int32Array]
    slots: list[Int32Array]
    logits_rows: Int32Array


def make_batch(arrays: StepArrays, copies: DeviceCopies) -> Batch:
    """The batch of a step that nothing has recorded."""
    lens = arrays.seq_lens.tolist()
    seq_lens = copies.put(arrays.seq_lens)
    return Batch(
        num_reqs=len(arrays.counts),
        num_tokens=len(arrays.positions),
        num_decodes=int(np.count_nonzero(arrays.counts == 1)),
        max_query_len=int(arrays.counts.max(initial=0)),
        token_ids=copies.put(arrays.token_ids),
        positions=copies.put(arrays.positions),
        query_start_loc=copies.put(arrays.starts),
        query_start_loc_host=arrays.starts.tolist(),
        num_valid_tokens=copies.put(arrays.starts[-1:].copy()),
        groups=tuple(
            GroupBatch(block_table=copies.put(table), slots=copies.put(slots), seq_lens=seq_lens, seq_lens_host=lens)
            for table, slots in zip(arrays.tables, arrays.slots, strict=True)
        ),
        logits_indices=copies.put(arrays.logits_rows),
    )


class StepBuffers:
    """Inputs of recorded steps in storage of fixed address: every request has `query_len` tokens, rows are padded.

    Batches of all sizes are views of the same storage; one of them holds a step at a time.

    Args:
        copies: To the device.
        max_num_reqs: Rows of the largest batch.
        query_len: Tokens of each request.
        table_width: Columns of a block table.
        num_groups: Cache groups.
    """

    def __init__(
        self, copies: DeviceCopies, max_num_reqs: int, query_len: int, *, table_width: int, num_groups: int
    ) -> None:
        most = max_num_reqs * query_len
        self.query_len, self.table_width = query_len, table_width
        self.in_place = copies.in_place
        """Whether the host may change a step where it lies, between two steps."""
        self._token_ids, self._positions = (DeviceBuffer(copies, copies.zeros(most)) for _ in range(2))
        self._num_valid, self._seq_lens = (DeviceBuffer(copies, copies.zeros(size)) for size in (1, max_num_reqs))
        self._tables = [DeviceBuffer(copies, copies.zeros(max_num_reqs, table_width)) for _ in range(num_groups)]
        self._slots = [DeviceBuffer(copies, copies.zeros(most)) for _ in range(num_groups)]
        starts = np.arange(max_num_reqs + 1, dtype=np.int32) * query_len
        self._starts_host: list[int] = starts.tolist()
        self._starts = copies.put(starts)
        self._indices = copies.put(np.arange(most, dtype=np.int32))
        self._used_columns = np.zeros(max_num_reqs, dtype=np.int32)
        """Columns of each row of the block tables that may be other than 0."""
        self._query = np.arange(query_len, dtype=np.int32)

    def batch(self, num_reqs: int) -> Batch:
        """Views of the storage for a step of `num_reqs` requests, padding included; `fill` puts a step into it."""
        tokens = num_reqs * self.query_len
        groups = tuple(
            GroupBatch(
                block_table=table.tensor[:num_reqs],
                slots=slots.tensor[:tokens],
                seq_lens=self._seq_lens.tensor[:num_reqs],
                seq_lens_host=[self.query_len] * num_reqs,
            )
            for table, slots in zip(self._tables, self._slots, strict=True)
        )
        return Batch(
            num_reqs=num_reqs,
            num_tokens=tokens,
            num_decodes=num_reqs,
            max_query_len=self.query_len,
            token_ids=self._token_ids.tensor[:tokens],
            positions=self._positions.tensor[:tokens],
            query_start_loc=self._starts[: num_reqs + 1],
            query_start_loc_host=self._starts_host[: num_reqs + 1],
            num_valid_tokens=self._num_valid.tensor,
            groups=groups,
            logits_indices=self._indices[:tokens],
        )

    def fill(self, arrays: StepArrays, batch: Batch) -> None:
        """Writes a step into the storage that `batch` views; the rows left over become padding.

        A padding row is a request of its own: `query_len` tokens at the first positions, in the null block, written
        nowhere.
        """
        reqs, tokens, extra = batch.num_reqs, batch.num_tokens, batch.num_reqs - len(arrays.counts)
        self._token_ids.fill(arrays.token_ids, tokens, 0)
        self._positions.fill(arrays.positions, tokens, np.tile(self._query, extra) if extra else 0)
        self._seq_lens.fill(arrays.seq_lens, reqs, self.query_len)
        self._num_valid.fill(arrays.starts[-1:], 1, 0)
        lens = arrays.seq_lens.tolist() + [self.query_len] * extra
        width = max(table.shape[1] for table in arrays.tables) if arrays.tables else 0
        columns = max(width, int(self._used_columns[:reqs].max(initial=0)))
        self._used_columns[:reqs] = width
        for index, group in enumerate(batch.groups):
            self._tables[index].fill(arrays.tables[index], reqs, 0, columns)
            self._slots[index].fill(arrays.slots[index], tokens, -1)
            group.seq_lens_host = lens

    def move_on(
        self, batch: Batch, token_ids: list[int], positions: list[int], seq_lens: list[int], slots: list[list[int]]
    ) -> None:
        """Another token for each request of the step that lies here; in place alone, as what follows.

        Args:
            batch: The one that holds them; rows left over stay padding.
            slots: One list a cache group.
        """
        # Kernels have driven all else out of the caches: plain memory takes a quarter of what numpy or torch would.
        count, lens = len(token_ids), seq_lens + [self.query_len] * (batch.num_reqs - len(token_ids))
        self._token_ids.memory[:count] = array("i", token_ids)
        self._positions.memory[:count] = array("i", positions)
        self._seq_lens.memory[:count] = array("i", seq_lens)
        for group, buffer, values in zip(batch.groups, self._slots, slots, strict=True):
            buffer.memory[:count] = array("i", values)
            group.seq_lens_host = lens

    def set_block(self, group: int, row: int, column: int, block_id: int) -> None:
        """Another block in a request's table; the null block where nothing may be read any more."""
        self._tables[group].memory[row, column] = block_id
        self._used_columns[row] = max(self._used_columns[row], column + 1)
