"""Tokens: sampling, and the mask of what may be sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from core_cpu import _kernels
from core_cpu.kernels.arguments import float32_address, int32_address, require
from core_cpu.tape_memory import empty

__all__ = ["sample", "token_bitmask"]


def sample(
    logits: Tensor,
    temperature: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """One token a row, [r], int32: the most likely one, or drawn by the Gumbel trick from what the filters keep.

    Args:
        logits: [r, vocab], float32, contiguous in the last dim, read-only.
        temperature: [r], float32; None or 0 takes the most likely token (lowest id among equals).
        seeds: [r], int64: Philox keys. positions: [r], int32: Philox counters. Both needed with a temperature.
        top_k: [r], int32; 0 keeps all. top_p: [r], float32; 1 keeps all. min_p: [r], float32; 0 keeps all.
    """
    rows, vocab = logits.shape
    require(logits.dtype == torch.float32 and logits.stride(1) == 1 and vocab > 0, "logits must be float32 rows")
    out = empty((rows,), torch.int32)
    if temperature is None:
        _kernels.sample(logits.data_ptr(), rows, vocab, logits.stride(0), out.data_ptr())
        return out
    require(seeds is not None and positions is not None, "drawing needs seeds and positions")
    assert seeds is not None and positions is not None
    require(seeds.dtype == torch.int64 and seeds.shape == (rows,) and seeds.is_contiguous(), "seeds must be int64 [r]")
    require(positions.shape == (rows,), "positions must be [r]")
    _kernels.sample(
        logits.data_ptr(),
        rows,
        vocab,
        logits.stride(0),
        out.data_ptr(),
        float32_address(temperature, "temperature", (rows,)),
        seeds.data_ptr(),
        int32_address(positions, "positions"),
        0 if top_k is None else int32_address(top_k, "top_k"),
        0 if top_p is None else float32_address(top_p, "top_p", (rows,)),
        0 if min_p is None else float32_address(min_p, "min_p", (rows,)),
    )
    return out


def token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Sets logits whose bit (v % 32 of word v // 32) is 0 to -inf, in place.

    Args:
        logits: [r, vocab], float32. bitmask: [r, >= ceil(vocab / 32)], int32.
    """
    rows, vocab = logits.shape
    require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be float32 rows")
    mask = int32_address(bitmask, "bitmask", 2)
    require(bitmask.shape[0] == rows and bitmask.shape[1] * 32 >= vocab, f"bitmask does not cover {(rows, vocab)}")
    _kernels.token_bitmask(logits.data_ptr(), rows, vocab, logits.stride(0), mask, bitmask.stride(0))
