"""How a KV cache lies in memory. The core handles blocks by id and never indexes inside a plane."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.spec import CacheKind, DType, KVCacheSpec

__all__ = ["CANONICAL_PREFIX", "KVLayout", "KVSlab", "Plane", "Region", "canonical_layout", "torch_dtype"]

CANONICAL_PREFIX = "canonical/"
"""Layout ids that start with it are token-major and readable by every composite."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of the same name."""
    found = getattr(torch, dtype.value)
    assert isinstance(found, torch.dtype)
    return found


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One tensor of a layer's cache.

    Args:
        name: "key", "value", "latent", "state0", ...
        dtype: Element type.
        block_shape: Shape of one block.
        head_axis: Which dim of `block_shape` counts KV heads; None where heads are not apart.
    """

    name: str
    dtype: DType
    block_shape: tuple[int, ...]
    head_axis: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this plane."""
        return math.prod(self.block_shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Region:
    """Memory that holds the blocks of one plane, as a transfer engine wants it.

    Args:
        address: Of block 0, in the address space of `device`.
        block_bytes: Bytes of a block that belong to the plane.
        stride: Bytes from one block to the next.
        memory_kind: "host" or "device".
        device: As torch spells it.
    """

    address: int
    block_bytes: int
    stride: int
    memory_kind: str
    device: str


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """What a block looks like.

    Args:
        id: Equal ids mean equal bytes; blocks of one id can be copied between backends of it.
        planes: Tensors of a layer.
        block_size: Tokens a block (1 for STATE: a block is a slot).
    """

    id: str
    planes: tuple[Plane, ...]
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, all planes."""
        return sum(plane.block_bytes for plane in self.planes)

    @property
    def canonical(self) -> bool:
        """Whether composites can read and write it."""
        return self.id.startswith(CANONICAL_PREFIX)

    def views(self, slab: Tensor, num_blocks: int) -> tuple[Tensor, ...]:
        """One tensor [num_blocks, *block_shape] a plane over the memory of one layer.

        Planes lie one after the other. Groups that share a slab have equal layouts, so that a block id means the same
        bytes to each of them.

        Args:
            slab: [num_blocks * block_bytes], uint8, contiguous; not copied.
        """
        assert slab.dtype == torch.uint8 and slab.numel() == num_blocks * self.block_bytes
        views, start = [], 0
        for plane in self.planes:
            size = num_blocks * plane.block_bytes
            part = slab[start : start + size].view(torch_dtype(plane.dtype))
            views.append(part.view(num_blocks, *plane.block_shape))
            start += size
        return tuple(views)


@dataclass(slots=True, kw_only=True)
class KVSlab:
    """The memory of one layer's cache (or of the layers, one in each group, that share it).

    Args:
        tensor: [num_blocks * layout.block_bytes], uint8.
        layout: How it is divided.
        num_blocks: Blocks, the null block 0 included.
    """

    tensor: Tensor
    layout: KVLayout
    num_blocks: int

    def views(self) -> tuple[Tensor, ...]:
        """The planes, [num_blocks, *block_shape] each."""
        return self.layout.views(self.tensor, self.num_blocks)

    def regions(self) -> list[Region]:
        """The planes' memory, for transfer engines."""
        kind = "host" if self.tensor.device.type == "cpu" else "device"
        return [
            Region(
                address=view.data_ptr(),
                block_bytes=plane.block_bytes,
                stride=plane.block_bytes,
                memory_kind=kind,
                device=str(self.tensor.device),
            )
            for plane, view in zip(self.layout.planes, self.views(), strict=True)
        ]


def canonical_layout(spec: KVCacheSpec, block_size: int) -> KVLayout:
    """The token-major layout that every composite reads: planes [block_size, num_kv_heads, dim].

    MLA and INDEX caches have one plane "latent"; STATE caches one plane for each of `state_shapes`, block size 1.
    """
    if spec.kind is CacheKind.STATE:
        states = tuple(
            Plane(name=f"state{i}", dtype=spec.dtype, block_shape=shape) for i, shape in enumerate(spec.state_shapes)
        )
        shapes = "x".join("_".join(map(str, shape)) for shape in spec.state_shapes)
        return KVLayout(id=f"{CANONICAL_PREFIX}state/{shapes}/{spec.dtype}", planes=states, block_size=1)
    heads = spec.num_kv_heads
    key_name = "key" if spec.v_head_dim else "latent"
    planes = [Plane(name=key_name, dtype=spec.dtype, block_shape=(block_size, heads, spec.head_dim), head_axis=1)]
    if spec.v_head_dim:
        planes.append(
            Plane(name="value", dtype=spec.dtype, block_shape=(block_size, heads, spec.v_head_dim), head_axis=1)
        )
    layout_id = f"{CANONICAL_PREFIX}{block_size}/{heads}x{spec.head_dim}+{spec.v_head_dim}/{spec.dtype}"
    return KVLayout(id=layout_id, planes=tuple(planes), block_size=block_size)
