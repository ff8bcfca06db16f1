"""Products of queries and keys, a piece of their elements at a time."""

import triton
import triton.language as tl

__all__ = ["add_by_pieces"]


@triton.jit
def add_by_pieces(logits, q_rows, row_mask, k_rows, inside, DIM: tl.constexpr, PIECE: tl.constexpr):
    """logits[m, n] + the sum over DIM elements of q[m] * k[n].

    Reads the queries again for each tile of keys: for chips whose registers do not hold them beside the sum of values.

    Args:
        logits: [M, N], float32.
        q_rows: [M], where the queries begin.
        row_mask: [M].
        k_rows: [N], where the keys begin; other types than the queries' are converted.
        inside: [N].
        PIECE: Elements of a product, a power of two.
    """
    for begin in range(0, DIM, PIECE):
        part = begin + tl.arange(0, PIECE)
        within = part < DIM
        q = tl.load(q_rows[:, None] + part[None, :], mask=row_mask[:, None] & within[None, :], other=0.0)
        k = tl.load(k_rows[:, None] + part[None, :], mask=inside[:, None] & within[None, :], other=0.0)
        logits += tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    return logits
