"""Decode steps that follow each other with the same requests: each is the one before, moved on by a token."""

from __future__ import annotations

from core.exec.input_batch import InputBatch, StepInputs
from core.exec.step_graphs import RecordedStep
from core.sched.output import SchedulerOutput

__all__ = ["DecodeRun"]


class DecodeRun:
    """A recorded step in which every request samples behind one token, and the steps that follow it.

    From one to the next each position, length and slot grows by one where it lies, and whatever else was made for the
    first step serves them all; only a request that comes to another block looks it up. What lies in the storage is
    what `InputBatch.prepare` would have put there, and nobody else may put a step there before the run has ended.

    Args:
        inputs: The first step; `advance` changes it in place.
        recorded: The recorded step that holds it.
        mirror: The runner's requests.
    """

    def __init__(self, inputs: StepInputs, recorded: RecordedStep, mirror: InputBatch) -> None:
        self.inputs, self.recorded = inputs, recorded
        self._mirror = mirror
        self._ids = [entry.request_id for entry in inputs.scheduled]
        self._next = inputs.sample_positions
        """Of each request the position of its token in the step that comes."""
        self._slots: list[list[int]] = [g.slots[: len(self._ids)].tolist() for g in recorded.batch.groups]
        """Of each group those of the step that lies in the storage."""
        self._windows = [(group, window) for group, window in enumerate(mirror.windows) if window]
        # A token that is drawn behind n others has position n.
        inputs.positions = recorded.batch.groups[0].seq_lens[: len(self._ids)]

    @staticmethod
    def may_begin(output: SchedulerOutput, recorded: RecordedStep) -> bool:
        """Whether a run may begin with this step, which lies in the storage of `recorded`."""
        return (
            recorded.buffers.in_place
            and bool(recorded.batch.groups)
            and output.num_scheduled_tokens == len(output.scheduled)
            and False not in [entry.samples for entry in output.scheduled]
        )

    def advance(self, output: SchedulerOutput) -> bool:
        """Moves on to a step; False, and nothing is changed, where it is not the next one of the run."""
        scheduled, buffers, block_size = output.scheduled, self.recorded.buffers, self._mirror.block_size
        if (
            output.new_requests
            or self.recorded.graph is None  # it could not be recorded
            or output.num_scheduled_tokens != len(self._ids)  # with the ids below: one token each, and so no drafts
            or [entry.request_id for entry in scheduled] != self._ids
            or [entry.num_computed_tokens for entry in scheduled] != self._next
            or False in [entry.samples for entry in scheduled]
        ):
            return False
        moved = [i for i, e in enumerate(scheduled) if e.num_computed_tokens % block_size == 0 or any(e.new_block_ids)]
        if moved and max(self._next) >= buffers.table_width * block_size:
            return False
        self._slots = [[slot + 1 for slot in slots] for slots in self._slots]
        for row in moved:
            self._mirror.append_blocks(scheduled[row])
            self._enter_block(row)
        self._leave_blocks()
        positions, self._next = self._next, [position + 1 for position in self._next]
        token_ids = self._mirror.sampled(self.inputs.mirror_rows)
        buffers.move_on(self.recorded.batch, token_ids, positions, self._next, self._slots)
        self.inputs.scheduled, self.inputs.sample_positions = scheduled, self._next
        for drawn in self.inputs.sampling_rows:
            drawn.position += 1
        return True

    def _enter_block(self, row: int) -> None:
        """Finds the block of a request's token in each group."""
        column, offset = divmod(self._next[row], self._mirror.block_size)
        for group in range(len(self._mirror.windows)):
            block_id = self._mirror.block_id(group, self.inputs.states[row], column)
            self.recorded.buffers.set_block(group, row, column, block_id)
            self._slots[group][row] = block_id * self._mirror.block_size + offset

    def _leave_blocks(self) -> None:
        """Hides the blocks whose last key has left the window of their group."""
        for group, window in self._windows:
            for row, position in enumerate(self._next):
                column, offset = divmod(position - window + 1, self._mirror.block_size)  # of the first key that is read
                if column > 0 and offset == 0:
                    self.recorded.buffers.set_block(group, row, column - 1, 0)
