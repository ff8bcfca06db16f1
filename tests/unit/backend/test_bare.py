"""A backend of four methods serves every operation on day one, and the defaults of the base class do their work."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator

import pytest
import torch
from bare import BareBackend, binder, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import i32, kv_spec, make_plan
from samples import SAMPLES
from torch import Tensor

from core.backend import (
    SCHEMES,
    Backend,
    CommLimits,
    GroupSpec,
    Kind,
    KVSlab,
    Pending,
    Role,
    SingleRank,
    UnsupportedError,
    WeightSource,
    canonical_layout,
)
from core.backend.ops import OPERATIONS
from core.backend.reference import COMPOSITES, HOST_READERS
from core.spec import CacheKind, DType, KVCacheSpec


def test_four_methods_are_all_that_is_abstract() -> None:
    assert Backend.__abstractmethods__ == {"probe", "open", "supports", "bind"}
    own = {name for name in vars(BareBackend) if not name.startswith("_")}
    assert own == {"probe", "open", "supports", "bind"}


def test_every_operation_has_a_composite_and_a_sample() -> None:
    assert set(COMPOSITES) == set(OPERATIONS) == set(SAMPLES)
    assert set(OPERATIONS) >= HOST_READERS


@pytest.mark.parametrize("name", SAMPLES)
def test_every_operation_binds_to_its_composite(name: str) -> None:
    table = binder()
    assert callable(table.bind(SAMPLES[name]))
    assert [row.kind for row, _ in table.table.rows()] == [Kind.COMPOSITE]
    with pytest.raises(UnsupportedError):
        table.backend.bind(SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_every_operation_is_plain_data(name: str) -> None:
    op = SAMPLES[name]
    assert hash(op) == hash(pickle.loads(pickle.dumps(op)))
    assert pickle.loads(pickle.dumps(op)) == op
    assert op.describe().startswith(f"{name}(dtype=float32")


@pytest.mark.parametrize("name", SAMPLES)
def test_every_operation_is_json(name: str) -> None:
    record = SAMPLES[name].to_dict()
    assert json.loads(json.dumps(record)) == record
    assert record["op"] == name and record["dtype"] == "float32" and record["determinism"] == "D0"


# -- defaults --------------------------------------------------------------------------------------------------------


@pytest.fixture
def backend() -> Iterator[BareBackend]:
    opened_backend = opened()
    yield opened_backend
    opened_backend.close()


def test_memory_and_arena(backend: BareBackend) -> None:
    memory = backend.memory()
    assert 0 < memory.free <= memory.total
    arena = backend.arena("kv", 1000)
    assert arena.commit(10).shape == (10,) and arena.tensor.shape == (1000,)
    arena.release()
    assert arena.tensor.numel() == 0
    assert arena.restore().shape == (1000,) and arena.tag == "kv"


def test_copies_round_trip(backend: BareBackend) -> None:
    for size in (0, 1, 13):
        source, target = torch.randn(size), torch.empty(size)
        backend.to_device(source, target).wait()
        back, pending = backend.to_host(target)
        pending.wait()
        assert pending.done() and torch.equal(back, source)
    assert backend.fence().done()


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(6)), st.integers(0, 3))
def test_copy_blocks_copies_whole_blocks(order: list[int], count: int) -> None:
    backend = opened()
    layout = canonical_layout(kv_spec(1, 2, 3, DType.FLOAT8_E4M3FN), 2)
    slabs = [
        KVSlab(tensor=torch.randint(0, 255, (6 * layout.block_bytes,), dtype=torch.uint8), layout=layout, num_blocks=6)
        for _ in range(2)
    ]
    before = [[view.view(torch.uint8).clone() for view in slab.views()] for slab in slabs]
    pairs = list(zip(order[:count], order[3 : 3 + count], strict=True))
    backend.copy_blocks(slabs[0], slabs[1], pairs, Pending()).wait()
    for view, old, source in zip(slabs[1].views(), before[1], before[0], strict=True):
        expected = old.clone()
        for a, b in pairs:
            expected[b] = source[a]
        assert torch.equal(view.view(torch.uint8), expected)


def test_plan_into_refreshes_the_captured_plan(backend: BareBackend) -> None:
    first, second = make_plan([1], [5], tables=[[3, 4]]), make_plan([2], [7], tables=[[5, 6]])
    spec = GroupSpec(index=0, layout=first.spec.layout)
    plan = backend.plan(first.batch, spec)
    seen: list[int] = []
    graph = backend.capture(lambda: seen.extend(plan.seq_lens.tolist()), [plan])
    graph.replay([plan])
    assert backend.plan(second.batch, spec, into=plan) is plan
    graph.replay([plan])
    assert seen == [5, 7] and plan.block_size == first.block_size


class Source(WeightSource):
    """A dense or quantized weight in memory."""

    def __init__(self, scheme: str, parts: dict[str, Tensor]) -> None:
        self.name, self.scheme, self._parts = "w", scheme, parts
        self.shape = tuple(parts["weight"].shape)

    def parts(self) -> dict[str, Tensor]:
        return self._parts


@pytest.mark.parametrize("role", ["linear", "embedding", "tied", "experts"])
def test_pack_keeps_or_converts(backend: BareBackend, role: Role) -> None:
    dense = Source("none", {"weight": torch.randn(4, 6).bfloat16()})
    packed = backend.pack(dense, SCHEMES["none"], role, torch.float32)
    assert packed.dense().dtype == torch.float32 and packed.nbytes == 4 * 6 * 4
    parts = {"weight": torch.randint(-9, 9, (4, 6), dtype=torch.int8), "scale": torch.rand(4, 1)}
    kept = backend.pack(Source("int8", parts), SCHEMES["int8"], role, torch.bfloat16)
    assert torch.equal(kept.tensors()["weight"], parts["weight"]) and kept.scheme == "int8"
    turned = backend.pack(Source("int8", parts), SCHEMES["none"], role, torch.float32)
    assert torch.equal(turned.dense(), parts["weight"] * parts["scale"])


def test_update_replaces_in_place_or_not_at_all(backend: BareBackend) -> None:
    packed = backend.pack(Source("none", {"weight": torch.zeros(2, 2)}), SCHEMES["none"], "linear", torch.float32)
    address = packed.tensors()["weight"].data_ptr()
    packed.update_({"weight": torch.ones(2, 2)})
    assert packed.tensors()["weight"].data_ptr() == address and (packed.dense() == 1).all()
    for wrong in ({}, {"weight": torch.zeros(2, 3)}, {"weight": torch.zeros(2, 2, dtype=torch.int8)}):
        with pytest.raises(ValueError, match="part 'weight' must be"):
            packed.update_(wrong)
    assert (packed.dense() == 1).all()


def test_a_world_of_one_is_the_identity(backend: BareBackend) -> None:
    comm = backend.comm([0], "tp", CommLimits())
    assert isinstance(comm, SingleRank)
    x = torch.randn(3)
    assert comm.all_reduce_(x) is x and comm.all_gather(x) is x and comm.reduce_scatter(x) is x
    assert comm.broadcast(x, 0) is x and comm.all_to_all_v(x, [3], [3]) is x


@pytest.mark.parametrize("kind", list(CacheKind))
def test_layouts_are_canonical_and_sized(backend: BareBackend, kind: CacheKind) -> None:
    latent, state = kind in (CacheKind.MLA, CacheKind.INDEX), kind is CacheKind.STATE
    spec = KVCacheSpec(
        kind=kind,
        num_kv_heads=1 if latent else 2,
        head_dim=8,
        v_head_dim=0 if latent else 4,
        dtype=DType.BFLOAT16,
        window=3 if kind is CacheKind.SLIDING else 0,
        state_shapes=((3, 5), (2, 2)) if state else (),
    )
    layout = backend.kv_layout(spec, 1 if state else 16)
    assert layout.canonical and layout.block_size == (1 if state else 16)
    assert layout.block_bytes == (2 * (15 + 4) if state else 16 * spec.token_bytes)
    slab = KVSlab(tensor=torch.zeros(3 * layout.block_bytes, dtype=torch.uint8), layout=layout, num_blocks=3)
    assert [view.shape[0] for view in slab.views()] == [3] * len(layout.planes)
    regions = slab.regions()
    assert sum(region.block_bytes for region in regions) == layout.block_bytes
    assert regions[0].address == slab.tensor.data_ptr() and regions[0].memory_kind == "host"


def test_index_tensors_are_int32() -> None:
    assert i32([1]).dtype == torch.int32
