"""KV layouts that differ from the canonical one: two planes for latent caches, fractals of 16 elements on 310P."""

from __future__ import annotations

from core.backend import KVLayout, Plane, canonical_layout
from core.spec import CacheKind, DType, KVCacheSpec
from core_ascend.chips import Chip

__all__ = [
    "FRACTAL",
    "LATENT_DIM",
    "ROPE_DIM",
    "ascend_layout",
    "fractal_cache",
    "is_fractal",
    "is_latent",
    "latent_cache",
]

LATENT_DIM = 512
"""Width of the latent that the attention call takes in its absorbed form."""
ROPE_DIM = 64
"""Width of the rotated part beside it."""
FRACTAL = 16
"""Elements in the last dim of a fractal of 16-bit values."""

_LATENT_PREFIX = "ascend/latent/"
_FRACTAL_PREFIX = "ascend/nz/"
_FRACTAL_BLOCK_ELEMENTS = 128 * 128
"""Most block_size * head_dim of the paged attention of 310P."""


def is_latent(layout: KVLayout) -> bool:
    """Whether its planes are the latent and the rotated key part, apart."""
    return layout.id.startswith(_LATENT_PREFIX)


def is_fractal(layout: KVLayout) -> bool:
    """Whether its planes are fractals."""
    return layout.id.startswith(_FRACTAL_PREFIX)


def latent_cache(chip: Chip, width: int, dtype: DType) -> bool:
    """Whether a latent cache of that row width lies in two planes on the chip."""
    return chip.fused_latent and width == LATENT_DIM + ROPE_DIM and dtype in chip.halves


def fractal_cache(chip: Chip, head_dim: int, v_head_dim: int, dtype: DType) -> bool:
    """Whether keys and values of such heads lie in fractals on the chip."""
    return chip.fractal_cache and v_head_dim == head_dim and head_dim % FRACTAL == 0 and dtype in chip.halves


def ascend_layout(spec: KVCacheSpec, block_size: int, chip: Chip) -> KVLayout:
    """The layout of a cache on a chip; canonical, so readable by composites, wherever the calls take that."""
    if spec.kind is CacheKind.MLA and latent_cache(chip, spec.head_dim, spec.dtype):
        planes = [
            Plane(name=name, dtype=spec.dtype, block_shape=(block_size, 1, width))
            for name, width in (("latent", LATENT_DIM), ("rope", ROPE_DIM))
        ]
        return KVLayout(id=f"{_LATENT_PREFIX}{block_size}/{spec.dtype}", planes=tuple(planes), block_size=block_size)
    grouped = spec.kind in (CacheKind.FULL, CacheKind.SLIDING)
    if grouped and fractal_cache(chip, spec.head_dim, spec.v_head_dim, spec.dtype):
        fits = block_size * spec.head_dim <= _FRACTAL_BLOCK_ELEMENTS
        if fits:
            shape = (spec.num_kv_heads * spec.head_dim // FRACTAL, block_size, FRACTAL)
            planes = [Plane(name=name, dtype=spec.dtype, block_shape=shape) for name in ("key", "value")]
            layout_id = f"{_FRACTAL_PREFIX}{block_size}/{spec.num_kv_heads}x{spec.head_dim}/{spec.dtype}"
            return KVLayout(id=layout_id, planes=tuple(planes), block_size=block_size)
    return canonical_layout(spec, block_size)
