"""The defaults on a device of its own: memory is asked of torch's module for it, a fence is an event of its stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare import opened

from core.backend import Backend, MemoryInfo, base


class Event:
    """Of a stream that is busy until somebody waits."""

    busy = True

    def query(self) -> bool:
        return not self.busy

    def synchronize(self) -> None:
        self.busy = False


@pytest.fixture
def backend() -> Backend:
    """A backend that says it took the second device of a kind which this machine need not have."""
    found = opened()
    found.device = torch.device("privateuseone", 1)
    return found


def test_memory_is_that_of_the_device(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(value: Any) -> Any:
        return lambda device: (asked.append(device), value)[1]

    module = SimpleNamespace(
        mem_get_info=answer((3, 9)),
        memory_reserved=answer(4),
        max_memory_reserved=answer(5),
        reset_peak_memory_stats=answer(None),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert backend.memory() == MemoryInfo(free=3, total=9, reserved=4, peak=5)
    backend.reset_peak()
    assert asked == [backend.device] * 4


@pytest.mark.parametrize("module", [SimpleNamespace(), None])
def test_memory_is_the_hosts_where_torch_cannot_tell(
    backend: Backend, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(device: torch.device) -> Any:
        if module is None:
            raise RuntimeError("no such module")
        return module

    monkeypatch.setattr(torch, "get_device_module", get)
    assert backend.memory().total == opened().memory().total
    backend.reset_peak()


def test_a_fence_is_done_when_the_stream_is(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    event, asked = Event(), []

    def current_stream(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    fence = backend.fence()
    assert asked == [backend.device] and not fence.done()
    fence.wait()
    assert fence.done()


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_the_host_is_never_behind(backend: Backend, kind: str) -> None:
    backend.device = torch.device(kind)
    assert type(backend.fence()) is base.Pending and backend.fence().done()
