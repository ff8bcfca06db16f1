"""The real device's paths against a stand-in for `torch.cuda` that writes down what is asked of the driver, in order.

No device is here: this shows the order of streams, events and copies, and not that a driver takes them (UNTESTED).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.backend import KVSlab, OpenConfig, canonical_layout
from core.backend.ops import RmsNormArgs, RmsNormOp
from core.spec import CacheKind, DeviceInfo, DType, KVCacheSpec
from core_cuda.backend import CudaBackend
from core_triton import gpu as module
from core_triton.gpu import Gpu, StreamEvent, runs
from core_triton.probing import Found

Log = list[tuple[Any, ...]]


class FakeCuda:
    """What of `torch.cuda` is used, on host tensors."""

    def __init__(self, count: int = 2) -> None:
        self.log: Log = []
        self.count, self.device_now, self.stream_now = count, 0, "main"

    def device_count(self) -> int:
        return self.count

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, device.index
        yield
        self.device_now = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        yield
        self.stream_now = before

    def Stream(self, device: torch.device) -> Any:
        names = iter(("copies", "recording"))
        known = sum(entry[0] == "stream" for entry in self.log)
        name = [*names][known]
        self.log.append(("stream", name, self.device_now))
        return self._stream(name)

    def current_stream(self, device: torch.device) -> Any:
        return self._stream(self.stream_now)

    def _stream(self, name: str) -> Any:
        log = self.log

        def record() -> Any:
            log.append(("record", name))
            return SimpleNamespace(query=lambda: True, synchronize=lambda: log.append(("wait", name)), of=name)

        return SimpleNamespace(
            name=name,
            record_event=record,
            wait_event=lambda event: log.append((name, "after", event.of)),
            wait_stream=lambda other: log.append((name, "after", other.name)),
        )

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append(("replay", self.device_now)))

    @contextmanager
    def graph(self, graph: Any, **options: Any) -> Iterator[None]:
        self.log.append(("capture", options["pool"], options["stream"].name, options["capture_error_mode"]))
        yield
        self.log.append(("captured",))

    def cudart(self) -> Any:
        return SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: self.log.append(("lock", size)) or 0,
            cudaHostUnregister=lambda address: self.log.append(("unlock",)),
        )

    def synchronize(self, device: torch.device) -> None:
        self.log.append(("synchronize", device.index))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    plain = torch.empty

    def empty(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            fake.log.append(("pinned", fake.stream_now))
        return plain(*args, **kwargs)

    monkeypatch.setattr(
        module, "torch", SimpleNamespace(cuda=fake, device=torch.device, empty=empty, uint8=torch.uint8)
    )
    return fake


@pytest.fixture
def gpu(cuda: FakeCuda) -> Gpu:
    made = Gpu(1)
    assert cuda.log == [("stream", "copies", 1), ("stream", "recording", 1)], "streams are of its own device"
    cuda.log.clear()
    return made


def slab(fill: int) -> KVSlab:
    spec = KVCacheSpec(kind=CacheKind.FULL, num_kv_heads=1, head_dim=16, v_head_dim=16, dtype=DType.BFLOAT16)
    layout = canonical_layout(spec, 16)
    return KVSlab(tensor=torch.full((layout.block_bytes * 6,), fill, dtype=torch.uint8), layout=layout, num_blocks=6)


def test_a_small_copy_goes_through_pinned_memory_and_the_source_is_free_at_once(gpu: Gpu, cuda: FakeCuda) -> None:
    source, target = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    pending = gpu.to_device(source, target)
    assert cuda.log == [("pinned", "main"), ("record", "main")]
    assert target.tolist() == [0, 1, 2, 3, 4] and isinstance(pending, StreamEvent)


def test_a_large_copy_takes_no_pinned_memory(gpu: Gpu, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGED_BYTES", 16)
    gpu.to_device(torch.arange(5), torch.zeros(5, dtype=torch.int64))
    assert cuda.log == [("record", "main")]


def test_a_copy_to_the_host_is_waited_for_by_its_event(gpu: Gpu, cuda: FakeCuda) -> None:
    target, pending = gpu.to_host(torch.arange(3))
    pending.wait()
    assert pending.done() and target.tolist() == [0, 1, 2]
    assert cuda.log == [("pinned", "main"), ("record", "main"), ("wait", "main")]


def test_blocks_go_over_the_copy_stream_between_two_events(gpu: Gpu, cuda: FakeCuda) -> None:
    """After the step that wrote them, without the host waiting, and before what the main stream does next."""
    source, target = slab(1), slab(2)
    fence = gpu.fence()
    gpu.copy_blocks(source, target, [(1, 2), (2, 3), (5, 1)], fence)
    gpu.copy_blocks(source, target, [(1, 2)], fence)
    size = source.tensor.nbytes
    assert cuda.log == [
        ("record", "main"),
        ("lock", size), ("lock", size),
        ("copies", "after", "main"), ("record", "copies"), ("main", "after", "copies"),
        ("copies", "after", "main"), ("record", "copies"), ("main", "after", "copies"),
    ]  # fmt: skip
    for view in target.views():
        whole = view.view(torch.uint8).flatten(1)
        assert [int(block.min()) for block in whole] == [2, 1, 1, 1, 2, 2]
    cuda.log.clear()
    gpu.close()
    gpu.close()
    assert cuda.log == [("synchronize", 1), ("unlock",), ("unlock",), ("synchronize", 1)]


def test_stretches_of_blocks_are_one_copy_each() -> None:
    assert [*runs([(1, 4), (2, 5), (3, 6), (5, 7), (6, 9), (4, 1)])] == [(1, 4, 3), (5, 7, 1), (6, 9, 1), (4, 1, 1)]
    assert [*runs([])] == []


def test_a_step_is_run_once_before_it_is_recorded_on_a_stream_of_its_own(gpu: Gpu, cuda: FakeCuda) -> None:
    calls: list[str] = []
    graph = gpu.capture(lambda: calls.append(cuda.stream_now) or len(calls))
    assert calls == ["recording", "main"], "the second call is what torch's own context records"
    assert cuda.log == [
        ("recording", "after", "main"), ("main", "after", "recording"),
        ("capture", "pool", "recording", "thread_local"), ("captured",),
    ]  # fmt: skip
    assert graph.replay([]) == 2 and len(calls) == 2
    assert cuda.log[-1] == ("replay", 1) and cuda.device_now == 0


@pytest.mark.parametrize(("count", "seen"), [(2, 1), (1, 0)])
def test_launches_are_on_the_own_device_whatever_the_threads_is(cuda: FakeCuda, count: int, seen: int) -> None:
    """With one device alone there is nothing to set, and nothing is paid for it."""
    cuda.count = count
    run = Gpu(count - 1).guarded(lambda args: cuda.device_now)
    assert run(None) == seen and cuda.device_now == 0


def test_an_opened_gpu_is_driven_through_these_paths(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """`open` takes torch's number of the device, and every method goes to it."""
    from core_triton import backend as shared

    device = DeviceInfo(index=0, arch="sm_90", memory_bytes=1, sdk="")
    for name in ("CORE_CUDA_SIMULATE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(CudaBackend, "look", lambda self: Found(devices=(device,), ordinals=(1,)))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=9, minor=0))
    monkeypatch.setattr(shared.registry, "bind", lambda op, target: lambda args: (target.arch, cuda.device_now))
    backend = CudaBackend()
    backend.open(0, OpenConfig())
    assert backend.device == torch.device("cuda", 1)
    assert backend.capabilities.pinned_memory and not backend.capabilities.unified_memory
    op = RmsNormOp(dtype=DType.BFLOAT16, dim=16, eps=1e-6)
    args = RmsNormArgs(x=torch.zeros(1, 16), weight=torch.zeros(16))
    assert backend.bind(op)(args) == ("sm_90", 1)
    assert isinstance(backend.fence(), StreamEvent)
    assert backend.to_host(torch.arange(2))[0].tolist() == [0, 1]
    assert backend.capture(lambda: 3, []).replay([]) == 3
    backend.close()
    backend.close()


def test_a_torch_that_counts_otherwise_is_told(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.backend import BackendUnavailableError

    device = DeviceInfo(index=0, arch="sm_90", memory_bytes=1, sdk="")
    for name in ("CORE_CUDA_SIMULATE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(CudaBackend, "look", lambda self: Found(devices=(device,), ordinals=(0,)))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=8, minor=0))
    with pytest.raises(BackendUnavailableError, match=r"sm_90 for the driver and sm_80 for torch.*CUDA_DEVICE_ORDER"):
        CudaBackend().open(0, OpenConfig())
