"""The kernels over torch tensors: each function checks dtypes, shapes and strides, then passes addresses on.

A wrong argument is an error of the caller inside the engine, never a user's: it raises ValueError with the value. The
GIL is released inside. Outputs are new tensors unless `out` is given.
"""

from __future__ import annotations

from core_cpu.kernels.arguments import DTYPE_CODES
from core_cpu.kernels.attention import AttentionKernel, attention, attention_ragged
from core_cpu.kernels.cache import (
    BLOCK_MULTIPLE,
    KvPlanes,
    copy_blocks,
    kv_block_shapes,
    kv_read,
    kv_write,
    kv_write_planned,
)
from core_cpu.kernels.process import isa, isa_levels, num_threads, rounds_attention, set_num_threads
from core_cpu.kernels.products import dequantize, embed, linear
from core_cpu.kernels.rows import ACTIVATIONS, act_mul, rms_norm, rope
from core_cpu.kernels.tokens import sample, token_bitmask
from core_cpu.kernels.weights import PackedWeight, Scheme, pack

__all__ = [
    "ACTIVATIONS",
    "BLOCK_MULTIPLE",
    "DTYPE_CODES",
    "AttentionKernel",
    "KvPlanes",
    "PackedWeight",
    "Scheme",
    "act_mul",
    "attention",
    "attention_ragged",
    "copy_blocks",
    "dequantize",
    "embed",
    "isa",
    "isa_levels",
    "kv_block_shapes",
    "kv_read",
    "kv_write",
    "kv_write_planned",
    "linear",
    "num_threads",
    "pack",
    "rms_norm",
    "rope",
    "rounds_attention",
    "sample",
    "set_num_threads",
    "token_bitmask",
]
