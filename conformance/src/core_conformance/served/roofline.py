"""What the device can do at most: bytes read a second and floating-point operations a second, measured here and now.

Each is the best of several ways: torch on the backend's device, and the backend's own matrix product. So a backend
whose kernels beat torch's is not measured against less than it can do, and slow kernels are measured against torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import LinearArgs, LinearOp
from core.errors import UnsupportedError
from core.spec import DType
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Subject
from core_conformance.target import Target

__all__ = ["Roofline", "better", "measure_roofline"]

_COLUMNS, _BATCH = 2048, 512
_FLOPS = 2.0 * _BATCH * _COLUMNS * _COLUMNS
_REPEATS = 6
_LEAST_S = 0.02
"""A measurement that is shorter is repeated inside the clock."""


@dataclass(frozen=True)
class Roofline:
    """The device's limits.

    Args:
        bytes_per_s: Memory traffic.
        flops_per_s: Operations of a matrix product in the model's dtype; a multiply-add counts two.
        bytes_by: Which way was best.
        flops_by: Which way was best.
    """

    bytes_per_s: float
    flops_per_s: float
    bytes_by: str
    flops_by: str


def better(one: Roofline, other: Roofline) -> Roofline:
    """The larger of each limit: whatever disturbs a measurement makes it smaller."""
    memory, matrix = (max(one, other, key=lambda line: getattr(line, name)) for name in ("bytes_per_s", "flops_per_s"))
    return Roofline(memory.bytes_per_s, matrix.flops_per_s, memory.bytes_by, matrix.flops_by)


def measure_roofline(target: Target, dtype: DType, *, megabytes: int) -> Roofline:
    """Opens the device, measures for a second or two, and closes it.

    Args:
        target: The backend.
        dtype: Of the products.
        megabytes: Size of the weights that are read; above every cache for a number that means anything.
    """
    with _all_threads():
        try:
            return _measure(Subject(target), dtype, megabytes << 20)
        finally:
            target.close()


def _measure(subject: Subject, dtype: DType, num_bytes: int) -> Roofline:
    weight = torch.full((num_bytes // (_COLUMNS * 2), _COLUMNS), 0.01, dtype=torch_dtype(dtype))
    batch = weight[:_BATCH].clone().to(subject.backend.device)

    def wait() -> None:
        subject.backend.fence().wait()

    traffic, rate = _torch_alone(weight.to(subject.backend.device), batch, wait)
    reads, product = _linear(subject, dtype, weight), _linear(subject, dtype, weight[: 2 * _COLUMNS])
    if reads is not None and product is not None:
        row = batch[:1].contiguous()
        traffic["backend linear"] = num_bytes / _seconds(partial(reads, row), wait)
        rate["backend linear"] = 2 * _FLOPS / _seconds(partial(product, batch), wait)
    bytes_by, flops_by = max(traffic, key=lambda name: traffic[name]), max(rate, key=lambda name: rate[name])
    return Roofline(traffic[bytes_by], rate[flops_by], bytes_by, flops_by)


def _torch_alone(weight: Tensor, batch: Tensor, wait: Callable[[], None]) -> tuple[dict[str, float], dict[str, float]]:
    """What torch reaches on the device by itself: bytes/s and flop/s by way."""
    twin, square, num_bytes = torch.empty_like(weight), weight[:_COLUMNS].contiguous(), weight.nbytes
    traffic = {
        "torch copy": 2.0 * num_bytes / _seconds(lambda: twin.copy_(weight), wait),
        "torch matrix-vector": num_bytes / _seconds(lambda: torch.mv(weight, weight[0]), wait),
    }
    return traffic, {"torch matmul": _FLOPS / _seconds(lambda: torch.mm(batch, square.T), wait)}


def _linear(subject: Subject, dtype: DType, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """The backend's own product with this weight; None where it has none in this form."""
    rows, columns = weight.shape
    op = LinearOp(dtype=dtype, in_features=columns, out_features=rows, weight_dtype=dtype, out_dtype=dtype)
    try:
        kernel = subject.bind(op)
        packed = subject.pack({"weight": weight}, "none", (rows, columns), dtype)
    except (UnsupportedError, UnsupportedOutcome):
        return None

    def call(x: Tensor) -> Tensor:
        out: Tensor = kernel(LinearArgs(x=x, weight=packed))
        return out

    return call


def _seconds(work: Callable[[], object], wait: Callable[[], None]) -> float:
    """Seconds of one call, the best of some repeats."""
    work()
    wait()
    best, calls = float("inf"), 1
    for _ in range(_REPEATS):
        while True:
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            wait()
            spent = time.perf_counter() - begin
            if spent >= _LEAST_S:
                break
            calls *= 2
        best = min(best, spent / calls)
    return best


@contextmanager
def _all_threads() -> Iterator[None]:
    """torch with as many threads as the server will have: the suite itself runs with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
