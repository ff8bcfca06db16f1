"""The random numbers that every backend shares: Philox4x32-10 (Salmon et al., 2011), one stream a request.

Key: the request's 64-bit seed. Counter: (position in the sequence, vocabulary index, stream, 0). The draw is
u = (floor(x0 / 512) + 0.5) / 2^23 with x0 the first output word: 24 bits, so it is exact in float32 and never 0 or 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["ACCEPT_STREAM", "GUMBEL_STREAM", "RECOVER_STREAM", "gumbel", "philox", "uniform"]

GUMBEL_STREAM = 0
"""Draws of ordinary tokens."""
ACCEPT_STREAM = 1
"""Acceptance of draft tokens."""
RECOVER_STREAM = 2
"""Draws after a rejected draft token."""

_MASK = 0xFFFFFFFF
_MUL0, _MUL1 = 0xD2511F53, 0xCD9E8D57
_WEYL0, _WEYL1 = 0x9E3779B9, 0xBB67AE85


def _mul_hi_lo(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of the 64-bit product of 32-bit words held in int64, without signed overflow."""
    low_half, high_half = a & 0xFFFF, a >> 16
    low = low_half * constant
    high = high_half * constant + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: Tensor, position: Tensor, index: Tensor, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four output words, each in [0, 2^32) as int64; arguments are int64 and broadcast together."""
    c0, c1, k0, k1 = torch.broadcast_tensors(position & _MASK, index & _MASK, seed & _MASK, (seed >> 32) & _MASK)
    c2, c3 = torch.full_like(c0, stream), torch.zeros_like(c0)
    for _ in range(10):
        high0, low0 = _mul_hi_lo(c0, _MUL0)
        high1, low1 = _mul_hi_lo(c2, _MUL1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL0) & _MASK, (k1 + _WEYL1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, position: Tensor, index: Tensor, stream: int) -> Tensor:
    """Uniform draws in (0, 1), float32."""
    word = philox(seed, position, index, stream)[0]
    return ((word >> 9).to(torch.float32) + 0.5) * (1.0 / 8388608.0)


def gumbel(seed: Tensor, position: Tensor, index: Tensor, stream: int) -> Tensor:
    """Standard Gumbel draws -log(-log(u)), float32."""
    return -torch.log(-torch.log(uniform(seed, position, index, stream)))
