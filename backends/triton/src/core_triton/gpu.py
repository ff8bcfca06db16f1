"""A GPU through torch: streams, pinned staging, block copies and recorded steps. CUDA and HIP builds are alike here.

Nothing of this has run on a device yet: UNTESTED, but for what the tests do with stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.backend import Graph, KVSlab, Pending, Plan

__all__ = ["STAGED_BYTES", "Gpu", "RecordedGraph", "StreamEvent", "runs"]

STAGED_BYTES = 16 * 2**20
"""Largest copy that goes through pinned memory of its own; larger ones are weights, which come once."""
_SCRATCH_BYTES = 64 * 2**20


class StreamEvent(Pending):
    """What a stream held when the event was recorded.

    Args:
        event: Recorded already.
    """

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class RecordedGraph(Graph):
    """A step that the driver has recorded.

    Args:
        gpu: Where.
        graph: Captured.
        result: What the recorded function returned: memory of the graph, overwritten by each replay.
    """

    __slots__ = ("_gpu", "_graph", "_result")

    def __init__(self, gpu: Gpu, fn: Callable[[], Any], graph: torch.cuda.CUDAGraph, result: Any) -> None:
        super().__init__(fn)
        self._gpu, self._graph, self._result = gpu, graph, result

    def replay(self, plans: Sequence[Plan]) -> Any:
        with self._gpu.current():
            self._graph.replay()
        return self._result


class Gpu:
    """One device of a torch build for CUDA or HIP.

    Everything is said with the device's own index: which device is the thread's current one is somebody else's affair.

    Args:
        index: As torch counts.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._alone = torch.cuda.device_count() == 1
        with self.current():
            # Blocks to and from the host go over a stream of their own, which drives the copy engine.
            self._copies = torch.cuda.Stream(self.device)
            self._recording = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()
        self._registered: dict[int, int] = {}
        # The allocator keeps what it is given back: scratch of kernels is there before the KV pool is sized.
        torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=self.device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within it this device is the thread's current one."""
        with torch.cuda.device(self.device):
            yield

    def guarded(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`run`, launched on this device whatever the thread's current one is."""
        if self._alone:
            return run
        device = self.device

        def guarded(args: Any) -> Any:
            with torch.cuda.device(device):
                return run(args)

        return guarded

    def fence(self) -> Pending:
        """Done when the work submitted to the current stream is."""
        return StreamEvent(torch.cuda.current_stream(self.device).record_event())

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        """Copies in stream order; small ones through pinned memory, so that the host goes on at once.

        The allocator of pinned memory gives a piece to nobody else before the copy out of it has ended.
        """
        if src.device.type == "cpu" and 0 < src.nbytes <= STAGED_BYTES and not src.is_pinned():
            staged = torch.empty(src.shape, dtype=src.dtype, pin_memory=True)
            staged.copy_(src)
            src = staged
        dst.copy_(src, non_blocking=True)
        return self.fence()

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Starts a copy into pinned memory."""
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        target.copy_(tensor, non_blocking=True)
        return target, self.fence()

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        """Copies blocks on the copy stream; what is submitted to the current stream later comes after them."""
        compute = torch.cuda.current_stream(self.device)
        for slab in (src, dst):
            self._register(slab.tensor)
        if isinstance(after, StreamEvent):
            self._copies.wait_event(after.event)
        else:
            after.wait()
        with torch.cuda.stream(self._copies):
            for a, b in zip(src.views(), dst.views(), strict=True):
                for source, target, count in runs(pairs):
                    b[target : target + count].copy_(a[source : source + count], non_blocking=True)
        done = self._copies.record_event()
        compute.wait_event(done)
        return StreamEvent(done)

    def capture(self, fn: Callable[[], Any]) -> RecordedGraph:
        """Records one call of `fn`, after one that compiles and allocates what a recording must not."""
        with self.current():
            self._recording.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._recording):
                fn()
            torch.cuda.current_stream(self.device).wait_stream(self._recording)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._recording, capture_error_mode="thread_local"):
                result = fn()
        return RecordedGraph(self, fn, graph, result)

    def close(self) -> None:
        """Gives back what is not the allocator's. Idempotent."""
        torch.cuda.synchronize(self.device)
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()

    def _register(self, tensor: Tensor) -> None:
        """Locks a slab of the host into memory, once: from pageable memory the driver copies while the host waits."""
        if tensor.device.type != "cpu" or not tensor.numel() or tensor.data_ptr() in self._registered:
            return
        code = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(code) == 0:  # where the limit of locked memory is too low, copies are slower and as right
            self._registered[tensor.data_ptr()] = tensor.nbytes


def runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, count) of stretches in which both sides go up by one: one copy each."""
    at = 0
    while at < len(pairs):
        source, target = pairs[at]
        count = 1
        while at + count < len(pairs) and pairs[at + count] == (source + count, target + count):
            count += 1
        yield source, target, count
        at += count
