"""What layers are built from: the binder, the types, this rank's place, and what is known of the stored weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from core.backend.comm import Communicator, SingleRank
from core.backend.layout import torch_dtype
from core.backend.negotiate import Binder, Resolved
from core.backend.ops import Determinism, OpSpec
from core.layers.store import WeightStore
from core.spec import DType

__all__ = ["BuildContext", "ParallelContext", "Quantization"]

Quantization = Literal["int8", "fp8"]
"""What `--quantization` may name: the scheme that dense weights are brought to at load."""


@dataclass(frozen=True, kw_only=True)
class ParallelContext:
    """This worker's place among the tensor-parallel ranks.

    Args:
        comm: The ranks' collectives; None in a dry build, which only counts.
        rank: Position among the ranks.
        world: Number of ranks.
    """

    comm: Communicator | None = None
    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, comm: Communicator) -> ParallelContext:
        """The place that a communicator gives."""
        return cls(comm=comm, rank=comm.rank, world=comm.world)


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """Everything that a model needs to be built; building reads no weight.

    A dry build resolves each operation into `binder.table` and binds none: neither an opened backend nor weights are
    needed, and what the device refuses is listed instead of raised. That is what `core doctor` prints.

    Args:
        binder: Resolves and binds operations; its backend is opened unless `dry`.
        dtype: Type of activations and of dense weights.
        kv_dtype: Type of the KV cache; None takes `dtype`.
        max_model_len: Longest sequence that will be served, the rows of rope tables; 0 takes the model's own.
        max_num_batched_tokens: Most tokens of a step; sizes buffers that a step fills.
        num_tokenizer_ids: Ids that the tokenizer knows; 0 where unknown. Rows of the head above it are padding.
        parallel: This rank.
        quantization: Bring dense weights of linear layers to this scheme.
        dequantize: Keep no quantized weight, whatever the device can do.
        quantize_activations: Let kernels for quantized weights, and those of attention, round their activations.
        determinism: Class that each operation is asked for.
        weights: The checkpoint, of which building reads names and schemes alone; None takes all weights for dense.
        dry: Whether to resolve only.
    """

    binder: Binder
    dtype: DType
    kv_dtype: DType | None = None
    max_model_len: int = 0
    max_num_batched_tokens: int = 2048
    num_tokenizer_ids: int = 0
    parallel: ParallelContext = ParallelContext(comm=SingleRank())
    quantization: Quantization | None = None
    dequantize: bool = False
    quantize_activations: bool = False
    determinism: Determinism = Determinism.D0
    weights: WeightStore | None = None
    dry: bool = False

    def may_round_activations(self, scheme: str) -> bool:
        """Whether a kernel for weights of `scheme` may choose how to round activations; "int8" rounds them anyway."""
        return scheme == "int8" or (self.quantize_activations and scheme != "none")

    @property
    def cache_dtype(self) -> DType:
        """Type of the KV cache."""
        return self.kv_dtype or self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        return torch_dtype(self.dtype)

    @property
    def device(self) -> torch.device:
        """Where tensors of the layers live. Not in a dry build."""
        return self.binder.backend.device

    def stored_scheme(self, name: str) -> str:
        """Scheme in which a weight is stored; "none" is dense, and so is what is not there (loading tells of it)."""
        return self.weights.scheme(name) if self.weights is not None and name in self.weights else "none"

    def resolve(self, op: OpSpec) -> Resolved:
        """How an operation would be done; counts nothing."""
        return self.binder.resolve(op)

    def bind(self, op: OpSpec) -> Callable[[Any], Any]:
        """The callable of an operation, counted in the binder's table.

        Raises:
            UnsupportedError: The device cannot do it, and this is no dry build.
        """
        if not self.dry:
            return self.binder.bind(op)
        self.binder.table.add(self.binder.resolve(op))
        return _never


def _never(args: Any) -> Any:
    raise AssertionError("a dry build binds no operation; build the model with dry=False to run it")
