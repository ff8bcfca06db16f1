"""What two ranks do together and check: every collective in every type, and the operations that use them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.backend import Communicator, torch_dtype
from core.backend.ops import CombineArgs, CombineOp, DispatchArgs, DispatchOp, ReduceNormArgs, ReduceNormOp, RmsNormOp
from core.backend.schemes import raw
from core.spec import DType
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite.test_l1_dense import DTYPES, norm_of
from core_conformance.tolerance import U_ACC, unit_roundoff

__all__ = ["CASES", "MOVED", "REDUCED", "WORLD"]

WORLD = 2
REDUCED = {**DTYPES, "int32": DType.INT32}
"""What can be summed."""
MOVED = {
    **REDUCED,
    "e4m3": DType.FLOAT8_E4M3FN,
    "e5m2": DType.FLOAT8_E5M2,
    "int8": DType.INT8,
    "uint8": DType.UINT8,
    "int64": DType.INT64,
}
"""What can be moved: model types, quantized activations, ids and bytes."""

Case = Callable[[Subject, Communicator], None]


def _numbers(dtype: DType, rank: int, *shape: int) -> Tensor:
    """Small whole numbers that differ from rank to rank; every type holds them and the sum of two exactly."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).remainder(7) + 8 * rank).view(shape).to(torch_dtype(dtype))


def _all_reduce(dtype: DType, subject: Subject, comm: Communicator) -> None:
    for shape in ((3, 2), (1,), (5, 4, 33)):
        there = subject.put(_numbers(dtype, comm.rank, *shape))
        out = comm.all_reduce_(there)
        exact = sum(_numbers(dtype, other, *shape).double() for other in range(WORLD))
        assert isinstance(exact, Tensor)
        subject.equal("all_reduce_", out, exact.to(torch_dtype(dtype)), "sum")
        subject.equal("all_reduce_", there, exact.to(torch_dtype(dtype)), "the tensor itself, which must hold the sum,")


def _same_everywhere(dtype: DType, subject: Subject, comm: Communicator) -> None:
    """Sums that must be rounded have the same bits on every rank, and twice the same."""
    draw = torch.Generator().manual_seed(comm.rank)
    mine = torch.randn(257, generator=draw).to(torch_dtype(dtype))
    sums = [subject.get(comm.all_reduce_(subject.put(mine))) for _ in range(2)]
    subject.equal("all_reduce_", sums[1], sums[0], "sum when done again")
    everyone = subject.get(comm.all_gather(subject.put(sums[0]))).view(WORLD, -1)
    for rank in range(WORLD):
        subject.equal("all_reduce_", everyone[rank], everyone[0], f"sum on rank {rank}")


def _all_gather(dtype: DType, subject: Subject, comm: Communicator) -> None:
    for shape in ((3, 2), (1,), (2, 3, 4)):
        got = comm.all_gather(subject.put(_numbers(dtype, comm.rank, *shape)))
        exact = torch.cat([raw(_numbers(dtype, other, *shape)) for other in range(WORLD)])
        subject.equal("all_gather", raw(got), exact, "rows in rank order")


def _reduce_scatter(dtype: DType, subject: Subject, comm: Communicator) -> None:
    for shape in ((4, 2), (2,), (6, 2, 5)):
        got = comm.reduce_scatter(subject.put(_numbers(dtype, comm.rank, *shape)))
        total = sum(_numbers(dtype, other, *shape).double() for other in range(WORLD))
        assert isinstance(total, Tensor)
        share = total.chunk(WORLD)[comm.rank].to(torch_dtype(dtype))
        subject.equal("reduce_scatter", got, share, "share of the sum")


def _all_to_all_v(dtype: DType, subject: Subject, comm: Communicator) -> None:
    """Uneven counts; a rank that sends nothing to itself."""
    rows = [[1, 2], [0, 3]]
    sent = [_numbers(dtype, rank, sum(rows[rank]), 3) for rank in range(WORLD)]
    received = [rows[other][comm.rank] for other in range(WORLD)]
    got = comm.all_to_all_v(subject.put(sent[comm.rank]), rows[comm.rank], received)
    starts = [sum(rows[other][: comm.rank]) for other in range(WORLD)]
    parts = [raw(sent[other])[start : start + n] for other, (start, n) in enumerate(zip(starts, received, strict=True))]
    subject.equal("all_to_all_v", raw(got), torch.cat(parts), "rows received")


def _broadcast(dtype: DType, subject: Subject, comm: Communicator) -> None:
    for root in range(WORLD):
        there = subject.put(_numbers(dtype, comm.rank, 3, 5))
        out = comm.broadcast(there, root)
        exact = raw(_numbers(dtype, root, 3, 5))
        subject.equal("broadcast", raw(out), exact, f"tensor of rank {root}")
        subject.equal("broadcast", raw(there), exact, f"the tensor itself, which must hold rank {root}'s,")


def _send_recv(dtype: DType, subject: Subject, comm: Communicator) -> None:
    """One message each way."""
    for sender in range(WORLD):
        message = _numbers(dtype, sender, 4, 3)
        if comm.rank == sender:
            comm.send(subject.put(message), 1 - sender)
            continue
        there = subject.put(torch.zeros_like(message))
        out = comm.recv(there, sender)
        subject.equal("send and recv", raw(out), raw(message), f"message of rank {sender}")
        subject.equal("send and recv", raw(there), raw(message), f"the tensor itself, for rank {sender}'s message,")


def _dispatch_combine(dtype: DType, subject: Subject, comm: Communicator) -> None:
    """Other numbers of tokens on each rank; every row comes to every rank, and sums come back."""
    op = DispatchOp(dtype=dtype, hidden_size=8, top_k=2, capacity=4, world=WORLD)
    back = CombineOp(dtype=dtype, hidden_size=8, capacity=4, world=WORLD)
    dispatch, combine, put = subject.bind(op), subject.bind(back), subject.put
    counts = [2, 4]
    x = [_numbers(dtype, rank, counts[rank], 8) for rank in range(WORLD)]
    weights = [torch.rand(n, 2, generator=torch.Generator().manual_seed(n)) for n in counts]
    ids = [torch.arange(2 * n, dtype=torch.int32).view(n, 2) for n in counts]
    mine = comm.rank
    out = dispatch(DispatchArgs(x=put(x[mine]), weights=put(weights[mine]), expert_ids=put(ids[mine]), comm=comm))
    got = [subject.get(part) for part in out]
    for rank, count in enumerate(counts):
        rows = slice(4 * rank, 4 * rank + count)
        for part, sent, what in zip(got, (x[rank], weights[rank], ids[rank]), ("x", "weights", "ids"), strict=True):
            subject.equal(op, part[rows], sent, f"{what} of rank {rank}")
        padding = torch.full((4 - count, 2), -1, dtype=torch.int32)
        subject.equal(op, got[2][4 * rank + count : 4 * rank + 4], padding, f"expert ids of rank {rank}'s padding")
    total = combine(CombineArgs(x=put(_numbers(dtype, mine, 4 * WORLD, 8)), num_tokens=counts[mine], comm=comm))
    sums = sum(_numbers(dtype, other, 4 * WORLD, 8).double() for other in range(WORLD))
    assert isinstance(sums, Tensor)
    own = sums[4 * mine : 4 * mine + counts[mine]].to(torch_dtype(dtype))
    subject.equal(back, total, own, "sum of the rank's own rows")


def _reduce_norm(dtype: DType, scatter: bool, subject: Subject, comm: Communicator) -> None:
    """The sum over the ranks, residual and norm; with scatter each rank keeps its rows."""
    op = ReduceNormOp(dtype=dtype, dim=48, eps=1e-5, world=WORLD, scatter=scatter)
    fn, kind = subject.bind(op), torch_dtype(dtype)
    parts = [torch.randn(4, 48, generator=torch.Generator().manual_seed(rank)).to(kind) for rank in range(WORLD)]
    shared = torch.Generator().manual_seed(9)
    residual, weight = torch.randn(4, 48, generator=shared).to(kind), torch.randn(48, generator=shared).to(kind)
    put = subject.put
    args = ReduceNormArgs(partial=put(parts[comm.rank]), weight=put(weight), residual=put(residual), comm=comm)
    y, total = fn(args)
    rows = slice(2 * comm.rank, 2 * comm.rank + 2) if scatter else slice(0, 4)
    exact = (sum(part.double() for part in parts) + residual.double())[rows]
    size = (sum(part.double().abs() for part in parts) + residual.double().abs())[rows]
    # The sum over the ranks may be rounded to the model's type before the residual joins it.
    bound = 2 * unit_roundoff(kind) * size + 4 * U_ACC * size
    subject.agree(op, total, exact, bound, "residual")
    norm = RmsNormOp(dtype=dtype, dim=48, eps=1e-5)
    subject.agree(op, y, *norm_of(norm, subject.get(total), weight), "norm")


def _world(subject: Subject, comm: Communicator) -> None:
    if (comm.world, comm.rank) not in [(WORLD, rank) for rank in range(WORLD)]:
        raise Mismatch(f"comm: rank {comm.rank} of {comm.world}, expected a rank of {WORLD}")


def _named(name: str, case: Callable[..., None], dtypes: dict[str, DType], *more: Any) -> dict[str, Case]:
    return {f"{name}-{short}": partial(case, dtype, *more) for short, dtype in dtypes.items()}


CASES: dict[str, Case] = {
    "world": _world,
    **_named("all_reduce_", _all_reduce, REDUCED),
    **_named("all_reduce_-same", _same_everywhere, DTYPES),
    **_named("all_gather", _all_gather, MOVED),
    **_named("reduce_scatter", _reduce_scatter, REDUCED),
    **_named("all_to_all_v", _all_to_all_v, MOVED),
    **_named("broadcast", _broadcast, MOVED),
    **_named("send", _send_recv, MOVED),
    **_named("op-dispatch_combine", _dispatch_combine, DTYPES),
    **_named("op-reduce_norm", _reduce_norm, DTYPES, False),
    **_named("op-reduce_norm-scatter", _reduce_norm, DTYPES, True),
}
"""Name to what both ranks do; in the same order on both."""
