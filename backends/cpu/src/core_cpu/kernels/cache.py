"""The paged cache: its blocks, writing, reading and copying."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core_cpu import _kernels
from core_cpu.kernels.arguments import dtype_code, head_parts, int32_address, require
from core_cpu.tape_memory import empty

__all__ = ["BLOCK_MULTIPLE", "KvPlanes", "copy_blocks", "kv_block_shapes", "kv_read", "kv_write", "kv_write_planned"]

BLOCK_MULTIPLE = 16
"""KV block sizes are multiples of it: keys of a block lie in panels of 16."""


def kv_block_shapes(
    dtype: torch.dtype, num_kv_heads: int, head_dim: int, v_head_dim: int, block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one block of the key plane and of the value plane (see csrc/kernels/kv.h)."""
    require(block_size % BLOCK_MULTIPLE == 0, f"block_size must be a multiple of {BLOCK_MULTIPLE}, got {block_size}")
    require(head_dim % 2 == 0, f"head_dim must be even, got {head_dim}")
    panels, v_panels = block_size // 16, -(-v_head_dim // 16)
    if dtype == torch.bfloat16:
        return (num_kv_heads, panels, head_dim // 2, 16, 2), (num_kv_heads, v_panels, block_size // 2, 16, 2)
    return (num_kv_heads, panels, head_dim, 16), (num_kv_heads, v_panels, block_size, 16)


class KvPlanes:
    """One layer's cache as the kernels see it.

    Args:
        key: [num_blocks, *key block shape] as `kv_block_shapes` says; blocks may lie apart, a block is contiguous.
        value: [num_blocks, *value block shape], as key.
        v_head_dim: Dimension of a value head (the plane pads it to a multiple of 16).
    """

    __slots__ = ("block_size", "dtype", "handle", "head_dim", "key", "num_kv_heads", "v_head_dim", "value")

    def __init__(self, key: Tensor, value: Tensor, v_head_dim: int) -> None:
        pair = 2 if key.dtype == torch.bfloat16 else 1
        self.key, self.value, self.dtype = key, value, key.dtype
        self.num_kv_heads, self.head_dim = key.shape[1], key.shape[3] * pair
        self.block_size, self.v_head_dim = key.shape[2] * 16, v_head_dim
        shapes = kv_block_shapes(key.dtype, self.num_kv_heads, self.head_dim, v_head_dim, self.block_size)
        ok = (tuple(key.shape[1:]), tuple(value.shape[1:])) == shapes and value.dtype == key.dtype
        require(ok, f"planes of {tuple(key.shape)} and {tuple(value.shape)} are no cache of blocks {shapes}")
        require(key[0].is_contiguous() and value[0].is_contiguous(), "a block must be contiguous")
        self.handle = _kernels.Cache(
            key.data_ptr(),
            value.data_ptr(),
            dtype_code(key, "key plane"),
            key.stride(0),
            value.stride(0),
            self.num_kv_heads,
            self.head_dim,
            v_head_dim,
            self.block_size,
        )


def kv_write(key: Tensor, value: Tensor, planes: KvPlanes, slots: Tensor) -> None:
    """Stores token t in slot slots[t] (block * block_size + offset); -1 is written nowhere.

    Args:
        key: [>= t, num_kv_heads, head_dim], any strides in the first two dims, read-only.
        value: [>= t, num_kv_heads, v_head_dim], dtype of key.
        slots: [t], int32.
    """
    address = int32_address(slots, "slots")
    key_parts = head_parts(key, "key", planes.num_kv_heads, planes.head_dim)
    value_parts = head_parts(value, "value", planes.num_kv_heads, planes.v_head_dim)
    require(key.dtype == value.dtype, f"key is {key.dtype} and value {value.dtype}")
    require(min(key.shape[0], value.shape[0]) >= slots.shape[0], "fewer tokens than slots")
    _kernels.kv_write(planes.handle, *key_parts, *value_parts, dtype_code(key, "key"), slots.shape[0], address)


def kv_write_planned(key: Tensor, value: Tensor, planes: KvPlanes, handle: _kernels.Plan) -> None:
    """As `kv_write`, into the slots that the plan holds when the call runs; a tape reads them at each replay."""
    key_parts = head_parts(key, "key", planes.num_kv_heads, planes.head_dim)
    value_parts = head_parts(value, "value", planes.num_kv_heads, planes.v_head_dim)
    require(key.dtype == value.dtype, f"key is {key.dtype} and value {value.dtype}")
    _kernels.kv_write_planned(planes.handle, *key_parts, *value_parts, dtype_code(key, "key"), handle)


def kv_read(planes: KvPlanes, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [n, num_kv_heads, head_dim] and values of some slots, in the cache's dtype; zeros where a slot is -1."""
    address, count = int32_address(slots, "slots"), slots.shape[0]
    key = empty((count, planes.num_kv_heads, planes.head_dim), planes.dtype)
    value = empty((count, planes.num_kv_heads, planes.v_head_dim), planes.dtype)
    _kernels.kv_read(planes.handle, key.data_ptr(), value.data_ptr(), count, address)
    return key, value


def copy_blocks(source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block a of `source` to block b of `target` for each pair; planes [num_blocks, ...], contiguous."""
    ok = source.is_contiguous() and target.is_contiguous() and source.shape[1:] == target.shape[1:]
    require(ok and source.dtype == target.dtype, "planes must be contiguous and have blocks of one shape and dtype")
    for a, b in pairs:
        inside = 0 <= a < source.shape[0] and 0 <= b < target.shape[0]
        require(inside, f"pair {(a, b)} is outside {source.shape[0]} and {target.shape[0]} blocks")
    block_bytes = source[0].numel() * source.element_size()
    _kernels.copy_blocks(source.data_ptr(), target.data_ptr(), block_bytes, list(pairs))
