"""Which request a program works for, found on the device: a launch knows numbers of tokens and requests alone."""

import triton
import triton.language as tl

__all__ = ["request_of_tile", "request_of_token"]


@triton.jit
def request_of_tile(starts, num_requests, tile, BLOCK_Q: tl.constexpr):
    """The request r with first(r) <= tile < first(r + 1), where first(r) = (starts[r] - starts[0]) // BLOCK_Q + r.

    Every request has at least ceil(tokens / BLOCK_Q) tiles, and tokens // BLOCK_Q + requests are enough for all.
    """
    origin = tl.load(starts)
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        first = (tl.load(starts + middle) - origin) // BLOCK_Q + middle
        if first <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def request_of_token(starts, num_requests, token):
    """The request r with starts[r] <= token < starts[r + 1]; requests without tokens are none's."""
    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) <= token:
            low = middle + 1
        else:
            high = middle
    return low - 1
