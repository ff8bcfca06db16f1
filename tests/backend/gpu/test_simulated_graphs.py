"""Recorded steps of a simulated device keep launches with their arguments, and refuse what a driver cannot record."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from core_triton import interpreter
from core_triton.simulated_graphs import NotRecordableError, record

interpreter.install()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def add_kernel(x, out, num: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = x[i] + num."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + num)


def add(x: Tensor, num: float) -> Tensor:
    out = torch.empty_like(x)
    add_kernel[(x.numel() // 4,)](x, out, num, BLOCK=4)
    return out


def test_a_replay_reads_what_the_storage_holds_now() -> None:
    x = torch.arange(8.0)
    graph = record(lambda: add(add(x, 1.0) * 2, 0.5), [])
    for start in (3.0, -5.0):
        x.copy_(torch.arange(8.0) + start)
        assert torch.equal(graph.replay([]), (torch.arange(8.0) + start + 1) * 2 + 0.5)


def test_the_result_keeps_its_place() -> None:
    x = torch.zeros(4)
    graph = record(lambda: (add(x, 1.0), [x.new_zeros(4).add_(x)]), [])
    first, [second] = graph.replay([])
    x.fill_(2.0)
    again, [other] = graph.replay([])
    assert again is first and other is second
    assert first.tolist() == [3.0] * 4 and second.tolist() == [2.0] * 4


def test_a_number_of_the_host_is_as_stale_as_on_a_chip() -> None:
    """What Python computed while recording is baked in: a kernel that needs it anew must read it on the device."""
    x, lengths = torch.zeros(4), SimpleNamespace(host=1.0)
    graph = record(lambda: add(x, lengths.host), [])
    lengths.host = 7.0
    assert graph.replay([]).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "read",
    [
        Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.cpu, bool, int,
        lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: torch.masked_select(x, x > 0),
    ],
    ids=["tolist", "item", "numpy", "cpu", "bool", "int", "mask", "nonzero", "masked_select"],
)  # fmt: skip
def test_a_step_that_reads_the_device_is_refused(read: Callable[[Tensor], Any]) -> None:
    x = torch.ones(1)
    with pytest.raises(NotRecordableError, match="while a step is recorded"):
        record(lambda: read(x + 1), [])
    assert torch.equal(record(lambda: x + 1, []).replay([]), torch.full((1,), 2.0)), "recording goes on after it"


def test_other_plans_than_those_of_the_recording_are_a_fault() -> None:
    graph = record(lambda: torch.ones(1), [])
    with pytest.raises(AssertionError, match="plans that it was recorded with"):
        graph.replay([object()])  # type: ignore[list-item]


def test_outside_of_a_recording_nothing_is_kept() -> None:
    x = torch.zeros(4)
    graph = record(lambda: add(x, 1.0), [])
    add(x, 5.0)
    assert graph.replay([]).tolist() == [1.0] * 4
