"""Recorded steps of the CPU backend: a tape keeps calls, its memory serves again, and padding costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from core.backend import Batch, GroupBatch, GroupSpec, KVSlab, OpenConfig, Plan, UnsupportedError
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    AttentionArgs,
    AttentionOp,
    LayerCache,
    LinearArgs,
    LinearOp,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    ReduceNormArgs,
    ReduceNormOp,
)
from core.backend.schemes import SCHEMES
from core.backend.weights import Packed, WeightSource
from core.spec import DType
from core_cpu.backend import CpuBackend
from core_cpu.recording import CpuGraph
from core_cpu.tape_memory import TapeMemory

HEADS, KV_HEADS, DIM, HIDDEN, BLOCK = 4, 2, 16, 64, 16


class _Dense(WeightSource):
    def __init__(self, weight: Tensor) -> None:
        self.name, self.shape, self.scheme, self._weight = "w", tuple(weight.shape), "none", weight

    def parts(self) -> dict[str, Tensor]:
        return {"weight": self._weight}


class _Layer:
    """The calls of a decoder layer, without a model around them."""

    def __init__(self, backend: CpuBackend) -> None:
        dtype = DType.BFLOAT16
        self.backend = backend
        generator = torch.Generator().manual_seed(5)

        def linear(n: int, k: int) -> tuple[Callable[[LinearArgs], Tensor], Packed]:
            op = LinearOp(dtype=dtype, in_features=k, out_features=n)
            weight = torch.randn(n, k, generator=generator).bfloat16() / 8
            return backend.bind(op), backend.pack(_Dense(weight), SCHEMES["none"], "linear", torch.bfloat16)

        self.qkv, self.out = linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), linear(HIDDEN, HEADS * DIM)
        self.gate_up, self.down = linear(192, HIDDEN), linear(HIDDEN, 96)
        self.write_op = QkNormRopeWriteOp(
            dtype=dtype,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            rotary_dim=DIM,
            kv_dtype=dtype,
        )
        self.attention_op = AttentionOp(
            dtype=dtype,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            kv_dtype=dtype,
            scale=0.25,
        )
        self.write, self.attend = backend.bind(self.write_op), backend.bind(self.attention_op)
        self.norm = backend.bind(ReduceNormOp(dtype=dtype, dim=HIDDEN, eps=1e-6))
        self.act = backend.bind(ActMulOp(dtype=dtype, size=96, activation="silu"))
        self.weight = torch.rand(HIDDEN, generator=generator).bfloat16()
        self.cos_sin = torch.rand(64, DIM, generator=generator)
        self.layout = backend.kv_layout(self.attention_op.cache_spec, BLOCK)
        self.spec = GroupSpec(index=0, layout=self.layout, ops=(self.write_op, self.attention_op))

    def new_cache(self) -> LayerCache:
        memory = torch.zeros(9 * self.layout.block_bytes, dtype=torch.uint8)
        return KVSlab(tensor=memory, layout=self.layout, num_blocks=9).views()

    def __call__(self, x: Tensor, batch: Batch, plan: Plan, cache: LayerCache, layers: int = 3) -> Tensor:
        residual = x  # overwritten once the first product has read it
        for _ in range(layers):
            flat = self.qkv[0](LinearArgs(x=x, weight=self.qkv[1]))
            q, k, v = (
                part.view(len(x), -1, DIM) for part in flat.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1)
            )
            q, k = self.write(
                QkNormRopeWriteArgs(
                    query=q, key=k, value=v, positions=batch.positions, cos_sin=self.cos_sin, cache=cache, plan=plan
                )
            )
            mixed = self.attend(AttentionArgs(query=q, cache=cache, plan=plan))
            partial = self.out[0](LinearArgs(x=mixed.view(len(x), -1), weight=self.out[1]))
            x, residual = self.norm(ReduceNormArgs(partial=partial, weight=self.weight, residual=residual))
            up = self.gate_up[0](LinearArgs(x=x, weight=self.gate_up[1]))
            partial = self.down[0](LinearArgs(x=self.act(ActMulArgs(x=up)), weight=self.down[1]))
            x, residual = self.norm(ReduceNormArgs(partial=partial, weight=self.weight, residual=residual))
        return x


@pytest.fixture
def layer() -> _Layer:
    backend = CpuBackend()
    backend.open(0, OpenConfig())
    return _Layer(backend)


def _batch(lens: list[int], size: int) -> Batch:
    """One token each for requests of these lengths, padded to `size`; request r lives in block r + 1."""
    extra, count = size - len(lens), len(lens)
    ints = torch.int32
    group = GroupBatch(
        block_table=torch.tensor([[r + 1] for r in range(count)] + [[0]] * extra, dtype=ints),
        slots=torch.tensor([(r + 1) * BLOCK + n - 1 for r, n in enumerate(lens)] + [-1] * extra, dtype=ints),
        seq_lens=torch.tensor(lens + [1] * extra, dtype=ints),
        seq_lens_host=lens + [1] * extra,
    )
    return Batch(
        num_reqs=size,
        num_tokens=size,
        num_decodes=size,
        max_query_len=1,
        token_ids=torch.zeros(size, dtype=ints),
        positions=torch.tensor([n - 1 for n in lens] + [0] * extra, dtype=ints),
        query_start_loc=torch.arange(size + 1, dtype=ints),
        query_start_loc_host=list(range(size + 1)),
        num_valid_tokens=torch.tensor([count], dtype=ints),
        groups=(group,),
        logits_indices=torch.arange(size, dtype=ints),
    )


def _refresh(batch: Batch, other: Batch) -> None:
    """Brings another step into the storage of a recorded one."""
    for name in ("token_ids", "positions", "num_valid_tokens"):
        getattr(batch, name).copy_(getattr(other, name))
    for name in ("block_table", "slots", "seq_lens"):
        getattr(batch.groups[0], name).copy_(getattr(other.groups[0], name))
    batch.groups[0].seq_lens_host = other.groups[0].seq_lens_host


def _x(count: int) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count)).bfloat16()


@torch.inference_mode()
def test_a_replay_is_bit_by_bit_the_step_of_its_valid_rows(layer: _Layer) -> None:
    """Four sizes of step through one recording of eight; what is cached is equal too."""
    batch, x, cache, twin = _batch([1] * 8, 8), torch.zeros(8, HIDDEN).bfloat16(), layer.new_cache(), layer.new_cache()
    plan = layer.backend.plan(batch, layer.spec)
    graph = layer.backend.capture(lambda: layer(x.view(8, HIDDEN), batch, plan, cache), [plan])
    assert not any(bool(part.any()) for part in cache), "recording ran a kernel"
    for lens in ([3, 1, 7, 2, 9], [4, 2], [5], [6, 3, 8, 3, 10, 1, 1, 1]):
        count = len(lens)
        x[:count] = _x(count)
        _refresh(batch, _batch(lens, 8))
        layer.backend.plan(batch, layer.spec, into=plan)
        alone = _batch(lens, count)
        expected = layer(_x(count), alone, layer.backend.plan(alone, layer.spec), twin)
        found = graph.replay([plan])
        assert torch.equal(found[:count], expected)
        assert bool(found.float().isfinite().all()), "rows of padding are finite"
        assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(cache, twin, strict=True))


@torch.inference_mode()
def test_memory_of_a_recording_does_not_grow_with_its_layers(layer: _Layer) -> None:
    backend, batch, cache = layer.backend, _batch([2] * 8, 8), layer.new_cache()
    plan, x = backend.plan(batch, layer.spec), _x(8)
    sizes, graphs = [], []
    for layers in (1, 400):
        graph = backend.capture(lambda count=layers: layer(x.view(8, HIDDEN), batch, plan, cache, count), [plan])
        assert isinstance(graph, CpuGraph)
        graphs.append(graph)
        assert backend._tape_memory is not None
        sizes.append(backend._tape_memory.num_bytes)
    assert graphs[1].num_calls > 2000
    assert sizes[0] == sizes[1]


def test_memory_serves_again_once_the_last_view_is_gone() -> None:
    memory = TapeMemory()
    first = memory.take((4, 64), torch.bfloat16)
    address, view = first.data_ptr(), first[1:].view(-1, 32)
    del first
    second = memory.take((4, 64), torch.bfloat16)
    assert second.data_ptr() != address, "a view still reads that memory"
    del view
    assert memory.take((2, 2), torch.float32).data_ptr() == address
    large = memory.take((3, 2**20), torch.float32)
    assert large.shape == (3, 2**20) and large.data_ptr() % 64 == 0
    total = memory.num_bytes
    del large
    assert memory.take((2**20,), torch.float32).numel() == 2**20
    assert memory.num_bytes == total


@torch.inference_mode()
def test_torch_calls_between_kernels_are_refused_and_leave_nothing_behind(layer: _Layer) -> None:
    batch = _batch([1], 1)
    plan, cache = layer.backend.plan(batch, layer.spec), layer.new_cache()

    def step() -> Tensor:
        return layer(_one, batch, plan, cache) * 2

    _one = _x(1)
    with pytest.raises(UnsupportedError, match=r"torch.s aten\.mul\.Tensor between kernels"):
        layer.backend.capture(step, [plan])
    before = layer(_x(1), batch, plan, layer.new_cache())
    assert bool(before.float().isfinite().all()), "kernels run again after a recording that failed"


@torch.inference_mode()
def test_other_threads_compute_while_one_records(layer: _Layer) -> None:
    batch, x = _batch([2], 1), _x(1)
    plan, cache = layer.backend.plan(batch, layer.spec), layer.new_cache()
    expected = layer(_x(1), batch, plan, layer.new_cache())
    seen: list[Tensor] = []

    def compute() -> None:
        with torch.inference_mode():
            seen.append(layer(_x(1), batch, plan, layer.new_cache()))

    def step() -> Tensor:
        other = threading.Thread(target=compute)
        other.start()
        other.join()
        return layer(x.view(1, HIDDEN), batch, plan, cache)

    layer.backend.capture(step, [plan])
    assert torch.equal(seen[0], expected)


@torch.inference_mode()
def test_a_replay_wants_the_plans_of_the_recording(layer: _Layer) -> None:
    batch, x, cache = _batch([2], 1), _x(1), layer.new_cache()
    plan = layer.backend.plan(batch, layer.spec)
    graph = layer.backend.capture(lambda: layer(x.view(1, HIDDEN), batch, plan, cache), [plan])
    with pytest.raises(AssertionError, match="not the plans"):
        graph.replay([layer.backend.plan(batch, layer.spec)])


@torch.inference_mode()
def test_a_profile_is_a_replay_that_names_each_call(layer: _Layer) -> None:
    batch, x, cache = _batch([2], 1), _x(1), layer.new_cache()
    plan = layer.backend.plan(batch, layer.spec)
    graph = layer.backend.capture(lambda: layer(x.view(1, HIDDEN), batch, plan, cache), [plan])
    assert isinstance(graph, CpuGraph)
    result = graph.replay([plan])
    expected = result.clone()
    result.zero_()
    x.copy_(_x(1))  # the layers write their residuals into it
    calls = graph.profile()
    assert len(calls) == graph.num_calls and all(seconds >= 0 for _, seconds in calls)
    heavy = [name for name, _ in calls if name in {"linear", "attention"}]
    assert heavy == ["linear", "attention", "linear", "linear", "linear"] * (len(heavy) // 5) and heavy
    assert torch.equal(result, expected)
