"""A checkpoint as models ask for it: sources of weights by name, with books kept of what was used and read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from core.backend.weights import WeightSource
from core.errors import ModelLoadError
from core.layers import WeightSlice
from core.loader.sources import FusedSource, SliceSource, StackedSource
from core.loader.tensor_info import Checkpoint

__all__ = ["HEAD", "ModelWeights"]

HEAD = "lm_head.weight"
"""Name of the output head, where it is not tied to the embedding."""

_IGNORED = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|k_scale|v_scale)")
_NAMES_SHOWN = 8


class ModelWeights:
    """Hands out the weights of an open checkpoint; a `core.layers.weights.WeightStore`.

    A tied model has no head of its own: a copy of it in the files is hidden.

    Args:
        checkpoint: Must stay open until every source was read.
        progress: Called with bytes done and in total, after each tensor that is read for the first time.

    Raises:
        ModelLoadError: The head is not tied to the embedding and the files have none.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> None:
        self._checkpoint = checkpoint
        self._hidden = {HEAD} if checkpoint.config.get("tie_word_embeddings", False) else set()
        if not self._hidden and HEAD not in checkpoint:
            raise ModelLoadError(
                f"{checkpoint.path} lacks {HEAD} and its configuration does not tie the head to the embedding; "
                'fetch the complete model, or set "tie_word_embeddings": true in config.json if they share weights'
            )
        self._names = [name for name in checkpoint.names() if name not in self._hidden]
        self._progress = progress
        self._total = sum(checkpoint.info(name).nbytes for name in self._names)
        self._done = 0
        self._used: set[str] = set()
        self._read: set[str] = set()

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, in the terms of config.json."""
        return self._checkpoint.config

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding."""
        return HEAD in self._hidden

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint and name not in self._hidden

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in elements.

        Raises:
            ModelLoadError: There is no such weight; the message names it.
        """
        return self._checkpoint.info(name).shape

    def scheme(self, name: str) -> str:
        """Scheme in which it is stored, a key of `core.backend.SCHEMES`; "none" is dense.

        Raises:
            ModelLoadError: There is no such weight; the message names it.
        """
        return self._checkpoint.info(name).scheme

    def require(self, names: Iterable[str]) -> None:
        """Checks that all these weights are there, before any is read.

        Raises:
            ModelLoadError: Some are not; the message names them.
        """
        missing = [name for name in names if name not in self]
        if missing:
            more = f" and {len(missing) - _NAMES_SHOWN} more" if len(missing) > _NAMES_SHOWN else ""
            raise ModelLoadError(
                f"{self._checkpoint.path} lacks {len(missing)} tensors of {self._checkpoint.architecture}: "
                f"{', '.join(missing[:_NAMES_SHOWN])}{more}; fetch the complete model"
            )

    def source(self, slices: Sequence[WeightSlice]) -> WeightSource:
        """One logical weight of the slices' rows, one slice below the other. Nothing is read yet.

        Slices in different schemes make a dense weight. Fused weights with one scale for a tensor were given one for
        each row when the checkpoint was opened.

        Raises:
            ModelLoadError: A weight is missing. Reading `parts()` raises it where a cut goes through a block of the
                scheme; `dense()` takes any cut.
        """
        self.require(part.name for part in slices)
        self._used.update(part.name for part in slices)
        sources = [SliceSource(self._checkpoint, part, self._count) for part in slices]
        return sources[0] if len(sources) == 1 else FusedSource(sources)

    def stacked(self, experts: Sequence[Sequence[WeightSlice]]) -> WeightSource:
        """One logical weight of all experts, [experts, N, K]; the slices of each are fused as `source` does.

        Raises:
            ModelLoadError: A weight is missing, or the experts differ in shape or scheme.
        """
        return StackedSource([self.source(slices) for slices in experts])

    def tensor(self, name: str) -> Tensor:
        """A weight as dense numbers on the host, read-only; it may be a view of the mapped file."""
        self.require([name])
        self._used.add(name)
        self._count(name)
        return self._checkpoint.load(name)

    def unused(self) -> tuple[str, ...]:
        """Tensors that nobody asked for, in the order of the files; those that need not be asked for left out."""
        return tuple(name for name in self._names if name not in self._used and not _IGNORED.fullmatch(name))

    def _count(self, name: str) -> None:
        if name in self._read:
            return
        self._read.add(name)
        self._done += self._checkpoint.info(name).nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
