"""Documented bounds of the calls, in one place: `rules` refuses by them and the simulation enforces them.

Source: the texts of torch_npu 2.13 (`torch_npu/_op_plugin_docs.py`) and vllm-ascend's use of the calls.
"""

from __future__ import annotations

from core.spec import DType

__all__ = [
    "DELTA_DIM",
    "FP8_TYPES",
    "HEAD_MULTIPLE",
    "INDEX_COUNTS",
    "INDEX_DIM",
    "INT4_ROWS",
    "MASK_SIZE",
    "MAX_DELTA_HEADS",
    "MAX_DELTA_STEPS",
    "MAX_EXPERTS",
    "MAX_HEAD_DIM",
    "MAX_HEAD_RATIO",
    "MAX_INDEX_HEADS",
    "MAX_INNER",
    "MAX_LATENT_HEADS",
    "MAX_LISTED",
    "MAX_PIECE",
    "MAX_ROTARY_DIM",
    "MAX_ROTARY_HEADS",
    "MAX_SINK_DIM",
    "PAGE",
    "ROW_BYTES",
]

PAGE = 128
"""Multiple, and preferred value, of the block size of paged attention."""
MASK_SIZE = 2048
"""Side of the one mask that the attention calls take for every causal batch, whatever its lengths."""
MAX_PIECE = 16
"""Most query tokens of a request in one call of latent attention; also what counts as decode."""
MAX_LISTED = 4096
"""Most requests in the host lists of one attention call."""
HEAD_MULTIPLE = 16
"""Heads of attention are multiples of it."""
MAX_HEAD_DIM = 256
"""Widest head of paged attention: wider ones were seen to be refused for packed queries."""
MAX_HEAD_RATIO = 64
"""Most query heads that share a key head."""
MAX_SINK_DIM = 128
"""Widest value head beside sinks."""
MAX_LATENT_HEADS = 128
"""Most query heads of latent attention; it takes powers of two."""
ROW_BYTES = 32
"""Heads in the cache are multiples of so many bytes, the unit in which memory is moved."""
MAX_ROTARY_DIM = 894
"""Largest head of the rotation call: an even number below 896."""
MAX_ROTARY_HEADS = 999
"""Most heads of the rotation call."""
MAX_INNER = 65535
"""Largest inner dim of quantized and grouped products."""
INT4_ROWS = 8
"""Multiple of the rows of a 4-bit weight: eight share a word."""
MAX_EXPERTS = 2048
"""Most experts of the routing call, groups padded to 32 each."""
INDEX_DIM = 128
"""Width of index keys."""
MAX_INDEX_HEADS = 64
"""Most heads of the index call."""
INDEX_COUNTS = (3072, 4096, 5120, 6144, 7168, 8192)
"""How many positions the index call chooses, besides 1 to 2048."""
DELTA_DIM = 128
"""Width of keys and values of the chunked gated delta rule."""
MAX_DELTA_HEADS = 64
"""Most heads of the chunked gated delta rule."""
MAX_DELTA_STEPS = 8
"""Most tokens of a request in the recurrent gated delta rule."""
FP8_TYPES = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2})
"""Types that none of the chips computes with."""
