"""Small operations beside a model's main line: adapters, accepted tree paths, and blocks between layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from core.backend.layout import KVLayout
from core.backend.ops.cache import LayerCache
from core.backend.ops.spec import Args, OpSpec

__all__ = [
    "ExportBlocksArgs",
    "ExportBlocksOp",
    "ImportBlocksArgs",
    "ImportBlocksOp",
    "LoraAddArgs",
    "LoraAddOp",
    "MoveTokensArgs",
    "MoveTokensOp",
]


@dataclass(slots=True, kw_only=True)
class LoraAddArgs(Args):
    """Run-time tensors of `lora_add_`.

    Args:
        y: [T, out_features], model dtype; written.
        x: [T, in_features], model dtype, read-only.
        a: [num_adapters, rank, in_features], model dtype.
        b: [num_adapters, out_features, rank], model dtype, scaling included.
        adapter_ids: [T], int32; -1 for none.
    """

    y: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    adapter_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class LoraAddOp(OpSpec):
    """y[t] += b[i] a[i] x[t] for the adapter i of each token, in place (Hu et al., 2021). Returns None."""

    name: ClassVar[str] = "lora_add_"
    args: ClassVar[type[Args]] = LoraAddArgs
    in_features: int
    out_features: int
    rank: int
    num_adapters: int


@dataclass(slots=True, kw_only=True)
class MoveTokensArgs(Args):
    """Run-time tensors of `move_tokens`.

    Args:
        cache: The layer's planes; written.
        source_slots: [M], int32; -1 skips the pair.
        target_slots: [M], int32.
    """

    cache: LayerCache
    source_slots: Tensor
    target_slots: Tensor


@dataclass(frozen=True, kw_only=True)
class MoveTokensOp(OpSpec):
    """Copies cached tokens to other slots, all reads before any write. Returns None."""

    name: ClassVar[str] = "move_tokens"
    args: ClassVar[type[Args]] = MoveTokensArgs
    layout: KVLayout


@dataclass(slots=True, kw_only=True)
class ExportBlocksArgs(Args):
    """Run-time tensors of `export_blocks`.

    Args:
        cache: The layer's planes, read-only.
        block_ids: [M], int32, device.
    """

    cache: LayerCache
    block_ids: Tensor


@dataclass(frozen=True, kw_only=True)
class ExportBlocksOp(OpSpec):
    """Copies blocks out into the canonical token-major form.

    Returns:
        One tensor [M * block_size, num_kv_heads, dim] a plane, in the cache's dtype.
    """

    name: ClassVar[str] = "export_blocks"
    args: ClassVar[type[Args]] = ExportBlocksArgs
    layout: KVLayout


@dataclass(slots=True, kw_only=True)
class ImportBlocksArgs(Args):
    """Run-time tensors of `import_blocks`.

    Args:
        cache: The layer's planes; written.
        block_ids: [M], int32, device.
        planes: As `export_blocks` returns them.
    """

    cache: LayerCache
    block_ids: Tensor
    planes: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class ImportBlocksOp(OpSpec):
    """Copies blocks in from the canonical token-major form. Returns None."""

    name: ClassVar[str] = "import_blocks"
    args: ClassVar[type[Args]] = ImportBlocksArgs
    layout: KVLayout
