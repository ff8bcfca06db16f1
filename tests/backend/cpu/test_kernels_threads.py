"""The thread pool: many callers at once, changing sizes, sleeping workers, forked children."""

from __future__ import annotations

import multiprocessing
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
