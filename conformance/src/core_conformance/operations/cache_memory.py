"""Cache memory on the device: poison wherever nobody wrote, and blocks brought out of any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from core.backend import Kind, KVSlab
from core.backend.ops import ExportBlocksArgs, ExportBlocksOp, ImportBlocksOp
from core.spec import CacheKind, DType, KVCacheSpec
from core_conformance.subject import Mismatch, Subject

__all__ = [
    "POISONS",
    "Poison",
    "export",
    "full_cache",
    "int32",
    "latent_cache",
    "new_cache",
    "poison_byte",
    "require_blocks",
]

Poison = Literal["nan", "large"]
POISONS: tuple[Poison, ...] = ("nan", "large")


def int32(values: Sequence[object]) -> Tensor:
    """An int32 tensor on the host."""
    return torch.tensor(values, dtype=torch.int32)


_LARGE = {DType.FLOAT16: 0x7B, DType.FLOAT8_E5M2: 0x7B, DType.FLOAT8_E4M3FNUZ: 0x7F}
_NAN = {DType.FLOAT8_E4M3FNUZ: 0x80, DType.INT8: 0x80}


def poison_byte(poison: Poison, dtype: DType) -> int:
    """The byte that, repeated, is NaN or a large finite number in `dtype`; int8 has its two ends."""
    return _NAN.get(dtype, 0xFF) if poison == "nan" else _LARGE.get(dtype, 0x7E)


def new_cache(subject: Subject, spec: KVCacheSpec, block_size: int, num_blocks: int, poison: Poison) -> KVSlab:
    """One layer's cache on the device in the backend's own layout, every byte of it poison."""
    layout = subject.backend.kv_layout(spec, block_size)
    memory = subject.backend.arena("kv", num_blocks * layout.block_bytes).tensor
    memory.fill_(poison_byte(poison, spec.dtype))
    return KVSlab(tensor=memory, layout=layout, num_blocks=num_blocks)


def export(subject: Subject, slab: KVSlab, block_ids: Sequence[int]) -> tuple[Tensor, ...]:
    """Blocks in the canonical token-major form, on the host."""
    op = ExportBlocksOp(dtype=slab.layout.planes[0].dtype, layout=slab.layout)
    out = require_blocks(subject, op)(
        ExportBlocksArgs(cache=slab.views(), block_ids=subject.put(int32(list(block_ids))))
    )
    return tuple(subject.get(plane) for plane in out)


def require_blocks(subject: Subject, op: ExportBlocksOp | ImportBlocksOp) -> Callable[[Any], Any]:
    """The callable that brings blocks out of, or into, the backend's layout; a private layout owes that.

    Raises:
        Mismatch: the layout is private and the backend has no such operation.
    """
    if subject.binder.resolve(op).kind is Kind.NO:
        raise Mismatch(
            f"the KV layout {op.layout.id!r} is private and {op.name} is not NATIVE: nobody can say what the cache "
            "holds, and its blocks cannot go to another device; bind export_blocks and import_blocks, or keep the "
            "canonical layout"
        )
    return subject.bind(op)


def full_cache(num_kv_heads: int, head_dim: int, dtype: DType, v_head_dim: int | None = None) -> KVCacheSpec:
    """A cache without a window."""
    value_dim = head_dim if v_head_dim is None else v_head_dim
    return KVCacheSpec(
        kind=CacheKind.FULL, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=value_dim, dtype=dtype
    )


def latent_cache(kind: CacheKind, dim: int, dtype: DType) -> KVCacheSpec:
    """A cache of one plane with one head: MLA or INDEX."""
    return KVCacheSpec(kind=kind, num_kv_heads=1, head_dim=dim, v_head_dim=0, dtype=dtype)
