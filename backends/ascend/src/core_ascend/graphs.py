"""Captured steps: the device's graph, and the host lists that every replay hands over anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from core.backend import Graph, Plan
from core_ascend import launches
from core_ascend.device import Device, Recording
from core_ascend.plan import AscendPlan

__all__ = ["NpuGraph", "capture"]


class NpuGraph(Graph):
    """A step in a graph of the device.

    Args:
        fn: What was captured.
        recording: The graph.
        calls: The calls in it that take host lists.
        result: What the capture returned; replays overwrite it.
    """

    __slots__ = ("_calls", "_recording", "_result")

    def __init__(
        self, fn: Callable[[], Any], recording: Recording, calls: Sequence[launches.HostLists], result: Any
    ) -> None:
        super().__init__(fn)
        self._recording, self._calls, self._result = recording, tuple(calls), result

    def replay(self, plans: Sequence[Plan]) -> Any:
        """Hands over the lists that the plans hold now, and replays. A captured call waits for its lists each time."""
        if self._calls:
            self._recording.update(cpu_update_input=[lists() for lists in self._calls])
        self._recording.replay()
        return self._result


def capture(device: Device, fn: Callable[[], Any], plans: Sequence[Plan]) -> NpuGraph:
    """Captures one call of `fn`, after one that leaves behind what is made only once (masks, tables, workspaces)."""
    for plan in plans:
        assert isinstance(plan, AscendPlan)
        # Any replay may bring padding, whatever the step that is captured holds.
        plan.always_padded = plan.maybe_padded = True
    fn()
    device.synchronize()
    recording = device.new_recording()
    with launches.recorded() as calls, device.capturing(recording):
        result = fn()
    return NpuGraph(fn, recording, calls, result)
