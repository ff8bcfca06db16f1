"""The arithmetic of GGUF block formats: packed bytes to float32, whole tensors of blocks at a time.

Every function takes `blocks: [n, block_bytes], uint8` and returns `[n, block_elements], float32`, a new tensor.
Multiplications and additions stay separate operations, as the format's reference does them: a fused multiply-add
would change last bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"]


def q8_0(blocks: Tensor) -> Tensor:
    """Values of Q8_0: half scale, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def q4_0(blocks: Tensor) -> Tensor:
    """Values of Q4_0: half scale, 32 nibbles around 8."""
    return (_nibbles(blocks[:, 2:]).view(torch.int8) - 8).float() * _half(blocks, 0)


def q4_1(blocks: Tensor) -> Tensor:
    """Values of Q4_1: half scale, half minimum, 32 nibbles."""
    return (_nibbles(blocks[:, 4:]).float() * _half(blocks, 0)).add_(_half(blocks, 2))


def q5_0(blocks: Tensor) -> Tensor:
    """Values of Q5_0: half scale, 32 high bits, 32 nibbles, around 16."""
    quants = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return (quants.view(torch.int8) - 16).float() * _half(blocks, 0)


def q5_1(blocks: Tensor) -> Tensor:
    """Values of Q5_1: half scale, half minimum, 32 high bits, 32 nibbles."""
    quants = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return (quants.float() * _half(blocks, 0)).add_(_half(blocks, 2))


def q4_k(blocks: Tensor) -> Tensor:
    """Values of Q4_K: two half scales, 8 pairs of 6-bit scale and minimum, 8 groups of 32 nibbles."""
    quants = _nibbles(blocks[:, 16:].reshape(-1, 32)).reshape(-1, 8, 32)
    return _scaled_groups(blocks, quants)


def q5_k(blocks: Tensor) -> Tensor:
    """Values of Q5_K: as Q4_K, with one high bit for each element in 32 bytes of 8 bit planes."""
    planes = (blocks[:, None, 16:48] >> _shifts(8, blocks)) & 1
    quants = _nibbles(blocks[:, 48:].reshape(-1, 32)).reshape(-1, 8, 32) | planes << 4
    return _scaled_groups(blocks, quants)


def q6_k(blocks: Tensor) -> Tensor:
    """Values of Q6_K: 256 low nibbles, 256 high bit pairs, 16 signed scales, half scale; around 32."""
    low = _nibbles(blocks[:, :128].reshape(-1, 64)).reshape(-1, 8, 32)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> (_shifts(4, blocks) * 2)
    quants = (low | (pairs.reshape(-1, 8, 32) & 3) << 4).view(torch.int8) - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return (quants.reshape(-1, 16, 16).float() * scales[:, :, None]).reshape(-1, 256)


def _scaled_groups(blocks: Tensor, quants: Tensor) -> Tensor:
    scale, minimum = _six_bit_pairs(blocks[:, 4:16])
    scale = _half(blocks, 0) * scale.float()
    minimum = _half(blocks, 2) * minimum.float()
    return (quants.float() * scale[:, :, None]).sub_(minimum[:, :, None]).reshape(-1, 256)


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Split 12 bytes into 8 scales and 8 minima: the last 4 share their low bits in bytes 8 to 11."""
    scale, minimum, shared = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((scale & 63, (shared & 15) | (scale >> 2 & 48)), dim=1)
    minima = torch.cat((minimum & 63, (shared >> 4) | (minimum >> 2 & 48)), dim=1)
    return scales, minima


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at byte `at` of each block, as a float32 column."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of a row, then its high nibbles."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _bits(packed: Tensor) -> Tensor:
    """Bits of a row, least significant first, one a byte."""
    return ((packed[:, :, None] >> _shifts(8, packed)[:, 0]) & 1).reshape(len(packed), -1)


def _shifts(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)[:, None]
