"""The thread pool: many callers at once, changing sizes, sleeping workers, forked children."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from core_cpu import kernels


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Puts the number of threads back."""
    before = kernels.num_threads()
    yield
    kernels.set_num_threads(before)


def problem() -> tuple[Tensor, kernels.PackedWeight, Tensor]:
    torch.manual_seed(0)
    weight, x = torch.randn(640, 300), torch.randn(50, 300)
    packed = kernels.pack(weight)
    kernels.set_num_threads(1)
    return x, packed, kernels.linear(x, packed)


def test_results_do_not_depend_on_how_many_threads_come() -> None:
    x, packed, expected = problem()
    for count in (2, 1, 5, 3, 8, 2):
        kernels.set_num_threads(count)
        for _ in range(20):
            assert torch.equal(kernels.linear(x, packed), expected)


def test_callers_from_several_threads_do_not_disturb_each_other() -> None:
    x, packed, expected = problem()
    kernels.set_num_threads(3)
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(60):
            if not torch.equal(kernels.linear(x[index:], packed), expected[index:]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong


def test_workers_that_fell_asleep_come_back() -> None:
    x, packed, expected = problem()
    kernels.set_num_threads(2)
    for _ in range(5):
        time.sleep(0.01)
        assert torch.equal(kernels.linear(x, packed), expected)


def _child(connection: multiprocessing.connection.Connection, x: Tensor, packed: kernels.PackedWeight) -> None:
    connection.send_bytes(kernels.linear(x, packed).numpy().tobytes())
    connection.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_workers_of_its_own() -> None:
    x, packed, expected = problem()
    kernels.set_num_threads(2)
    assert torch.equal(kernels.linear(x, packed), expected)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, x, packed))
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv_bytes() == expected.numpy().tobytes()
    child.join(timeout=10)
    assert child.exitcode == 0


_BOUND = """
import os, time, torch
from core_cpu import kernels
kernels.set_num_threads(len(os.sched_getaffinity(0)))
before = set(os.listdir("/proc/self/task"))
kernels.linear(torch.randn(64, 512), kernels.pack(torch.randn(512, 512)))
workers = set(os.listdir("/proc/self/task")) - before
asked, end = os.environ["CORE_CPU_BIND"] == "1", time.monotonic() + 30
while True:  # a worker may come to run after the call that it was made for
    found = sorted(tuple(os.sched_getaffinity(int(worker))) for worker in workers)
    if time.monotonic() > end or all((len(cpus) == 1) == asked for cpus in found):
        break
    time.sleep(0.01)
print(found)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor has no workers")
@pytest.mark.parametrize("bind", ["0", "1"])
def test_workers_are_bound_to_processors_only_where_that_is_asked_for(bind: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    env = {**os.environ, "CORE_CPU_BIND": bind}
    told = subprocess.run([sys.executable, "-c", _BOUND], env=env, capture_output=True, text=True, check=True).stdout
    each = [(cpu,) for cpu in allowed[1:]] if bind == "1" else [tuple(allowed)] * (len(allowed) - 1)
    assert told.strip() == str(each)
