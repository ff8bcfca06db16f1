"""What the runner knows of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from torch import Tensor

from core.backend.batch import Batch, Plan
from core.backend.ops import LayerCache, OpSpec
from core.layers import BuildContext, SchemeChoice, WeightStore
from core.spec import DType, ModelSpec

__all__ = ["CausalLM"]


class CausalLM(Protocol):
    """A decoder that turns tokens into logits of the next ones.

    Built without weights (`from_config`), then loaded once (`load`), then called step by step: `forward`, and `logits`
    of the rows that are wanted. An out-of-tree model is a class of this shape that `core_models()` names.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any], ctx: BuildContext) -> Self:
        """Builds the model and binds its operations; reads no weight. `ctx.dry` only lists the operations.

        Args:
            config: As in config.json.

        Raises:
            ModelLoadError: The configuration lacks something, or wants what the model does not have.
            ConfigError: The model cannot be divided among the ranks, or a flag contradicts another.
            UnsupportedError: The device cannot do an operation.
        """
        ...

    @classmethod
    def describe(
        cls,
        config: Mapping[str, Any],
        dtype: DType,
        *,
        kv_dtype: DType | None = None,
        num_tokenizer_ids: int = 0,
        world: int = 1,
    ) -> ModelSpec:
        """The model's shape from its configuration alone, for one of `world` tensor-parallel ranks."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """The model's shape on this rank."""
        ...

    @property
    def cache_ops(self) -> tuple[tuple[OpSpec, ...], ...]:
        """For each layer the operations that use its plan; empty for a layer without a cache."""
        ...

    def weight_schemes(self) -> Iterator[SchemeChoice]:
        """How each weight is kept on the device, and why."""
        ...

    def load(self, weights: WeightStore) -> None:
        """Reads all weights and brings them to the device; peak of one weight above the loaded model.

        Raises:
            ModelLoadError: A weight is missing or of another shape; the message names it.
        """
        ...

    def prepare(self, batch: Batch) -> None:
        """Makes ready what depends on the step and is no operation. Stream-ordered.

        `forward` does it where it was not done for the batch; whoever records or replays `forward` calls it first.
        """
        ...

    def forward(self, batch: Batch, plans: Sequence[Plan | None], caches: Sequence[LayerCache | None]) -> Tensor:
        """Hidden states of a step, [T, hidden_size], model dtype, normed. Writes the step's keys and values.

        Args:
            plans: The plan of each layer's cache group.
            caches: The planes of each layer's cache.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, rows of the head], float32, of hidden states [S, hidden_size].

        Columns from `spec.vocab_size` on are padding of the head: no token ids, never to be drawn or reported.
        """
        ...
