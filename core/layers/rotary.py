"""Tables of cosines and sines: fixed ones by position, or made for each step where length matters."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend.batch import Batch
from core.layers.context import BuildContext
from core.layers.rope_config import RopeConfig
from core.layers.rope_frequencies import attention_factor, frequencies, frequencies_for_lengths

__all__ = ["LengthRotary", "RotaryEmbedding", "make_rotary"]


class RotaryEmbedding:
    """A fixed table, shared by all layers of equal settings.

    Args:
        ctx: What it is built from.
        rope: The frequencies.
        num_positions: Rows of the table.
    """

    _table: Tensor

    def __init__(self, ctx: BuildContext, rope: RopeConfig, num_positions: int) -> None:
        self.rope = rope
        self._ctx = ctx
        self._num_positions = num_positions

    def load(self) -> None:
        """Makes the table on the device."""
        positions = torch.arange(self._num_positions, dtype=torch.float32)
        angles = positions[:, None] * frequencies(self.rope)
        self._table = _cos_sin(angles, self.rope).to(self._ctx.device)

    def prepare(self, batch: Batch) -> None:
        """Called before a step, outside of what a graph records. A fixed table has nothing to prepare."""

    def lookup(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(rows [T] int32, table [num_rows, rotary_dim] float32) for the tokens of a step."""
        return batch.positions, self._table


class LengthRotary(RotaryEmbedding):
    """Angles that depend on how long the token's own sequence is (dynamic NTK, longrope): one row a token.

    A sequence is as long as the step makes it, whatever else is in the batch: neighbours never change an answer. Keys
    stay as they were rotated when they were cached, so a prompt in chunks gives what the same chunks give in
    transformers; the table of a whole prompt would differ only where a chunk ends below the trained length and the
    prompt above. The rows are written before the step into storage of fixed address, so graphs stay valid.
    """

    _rows: Tensor

    def load(self) -> None:
        """Reserves a row for each token of the largest step."""
        most, device = self._ctx.max_num_batched_tokens, self._ctx.device
        self._rows = torch.arange(most, dtype=torch.int32, device=device)
        self._table = torch.zeros(most, self.rope.rotary_dim, dtype=torch.float32, device=device)

    def prepare(self, batch: Batch) -> None:
        """Fills the rows of a step's tokens. Stream-ordered; asks the device nothing.

        Args:
            batch: At most `max_num_batched_tokens` tokens.
        """
        count, starts = batch.num_tokens, batch.query_start_loc.long()
        assert count <= len(self._table), f"{count} tokens in a step, {len(self._table)} were announced"
        if not count:
            return
        lengths = batch.positions[starts[1:] - 1] + 1
        requests = torch.arange(batch.num_reqs, device=starts.device)
        owner = torch.repeat_interleave(requests, starts.diff(), output_size=count)
        radians = frequencies_for_lengths(self.rope, lengths)[owner]
        angles = batch.positions[:count, None].to(torch.float32) * radians
        self._table[:count].copy_(_cos_sin(angles, self.rope))

    def lookup(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(rows [T] int32, table) of the step that was prepared."""
        return self._rows[: batch.num_tokens], self._table


def _cos_sin(angles: Tensor, rope: RopeConfig) -> Tensor:
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(attention_factor(rope))


def make_rotary(ctx: BuildContext, rope: RopeConfig, num_positions: int) -> RotaryEmbedding:
    """The kind of table that the settings need."""
    kind = LengthRotary if rope.depends_on_length else RotaryEmbedding
    return kind(ctx, rope, num_positions)
