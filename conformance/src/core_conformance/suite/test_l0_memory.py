"""L0: memory, copies, layouts, weights, plans and graphs: the methods with a default, overridden or not."""

from __future__ import annotations

import torch
from torch import Tensor

from core.backend import KVSlab, Packed, Plane, torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, RmsNormArgs, RmsNormOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.operations.cache_memory import full_cache, new_cache
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Subject

_ODD_SIZES = (0, 1, 3, 257, 4099)


@check("L0/memory")
def test_memory_is_told_in_plausible_bytes(subject: Subject) -> None:
    """0 <= free <= total, reserved and peak at least 0; the peak can be started anew."""
    memory = subject.backend.memory()
    assert 0 <= memory.free <= memory.total, f"free {memory.free} and total {memory.total} bytes contradict each other"
    assert memory.total > 0, "total must be known"
    assert memory.reserved >= 0 and memory.peak >= 0, f"reserved {memory.reserved}, peak {memory.peak}"
    subject.backend.reset_peak()
    again = subject.backend.memory()
    assert again.peak <= max(memory.peak, again.reserved, 0), "reset_peak() raised the peak"


@check("L0/arena-round-trip")
def test_an_arena_keeps_bytes_and_comes_back(subject: Subject) -> None:
    """Odd sizes: what is written is read; a part can be committed; after release and restore it is whole again."""
    for size in (1, 3, 4099):
        arena = subject.backend.arena("kv", size)
        assert arena.tensor.dtype == torch.uint8 and arena.tensor.numel() == size, (
            f"{arena.tensor.shape} of {size} bytes"
        )
        assert arena.tensor.device.type == subject.backend.device.type, f"it lies on {arena.tensor.device}"
        assert arena.tag == "kv"
        pattern = torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)
        subject.backend.to_device(pattern, arena.tensor).wait()
        subject.equal("arena", arena.tensor, pattern, f"{size} bytes")
        assert arena.commit(size // 2).numel() == size // 2
        address = arena.tensor.data_ptr()
        arena.release()
        restored = arena.restore()
        assert restored.numel() == size, f"restore() gave {restored.numel()} of {size} bytes"
        assert not arena.stable_address or restored.data_ptr() == address, "stable_address, and the address changed"
        restored.fill_(7)
        subject.equal("arena", arena.tensor, torch.full((size,), 7, dtype=torch.uint8), "after restore")


@check("L0/copy-round-trip", ["bf16", "fp16", "fp32", "int64", "int32", "uint8", "bool", "e4m3", "e5m2", "int8"])
def test_copies_there_and_back_are_exact(subject: Subject, variant: str) -> None:
    """Odd sizes, none included; the source may be reused once the copy is done."""
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    dtype = getattr(torch, names.get(variant, variant))
    for size in _ODD_SIZES:
        host = torch.arange(size).remainder(2 if variant == "bool" else 120).to(dtype)
        kept = host.clone()
        there = subject.put(host)
        host.zero_()
        back, pending = subject.backend.to_host(there)
        pending.wait()
        assert pending.done(), "a Pending that was waited for is done"
        assert back.device.type == "cpu", f"to_host gave a tensor on {back.device}"
        subject.equal(f"to_device and to_host of {size} elements", back, kept)


@check("L0/fence")
def test_a_fence_ends(subject: Subject) -> None:
    """After wait() it is done, and what was submitted before it is there."""
    values = torch.arange(1000, dtype=torch.float32)
    there = torch.empty(1000, dtype=torch.float32, device=subject.backend.device)
    subject.backend.to_device(values, there)
    fence = subject.backend.fence()
    fence.wait()
    assert fence.done(), "fence() was waited for and is not done"
    subject.equal("fence", there, values)


@check("L0/kv-layout")
def test_layouts_are_consistent_before_open(subject: Subject) -> None:
    """Planes add up to the block, ids tell layouts apart, and views cover the slab without overlapping."""
    closed = subject.target.make()
    ids: dict[str, tuple[Plane, ...]] = {}
    for size in subject.backend.capabilities.block_sizes:
        for dtype in (DType.BFLOAT16, DType.FLOAT32):
            for heads, dim in ((1, 64), (2, 64), (4, 32)):
                spec = full_cache(heads, dim, dtype)
                layout = closed.kv_layout(spec, size)
                assert layout == subject.backend.kv_layout(spec, size), "kv_layout() changes with open()"
                assert layout.block_size == size, f"{layout.id} has block size {layout.block_size}, asked for {size}"
                needed = size * spec.token_bytes
                assert layout.block_bytes >= needed, f"{layout.id}: {layout.block_bytes} bytes, {needed} are needed"
                assert ids.setdefault(layout.id, layout.planes) == layout.planes, f"{layout.id} names two layouts"
                for plane in layout.planes:
                    axis = plane.head_axis
                    assert axis is None or plane.block_shape[axis] == heads, f"{layout.id}: head_axis of {plane.name}"
                _check_views(KVSlab(tensor=_slab(layout.block_bytes * 3), layout=layout, num_blocks=3))


@check("L0/copy-blocks")
def test_blocks_copy_whole_between_device_and_host(subject: Subject) -> None:
    """Device to device, to host and back: the named blocks arrive bit by bit, no other changes; no pair copies none."""
    spec = full_cache(2, 64, DType.BFLOAT16)
    source = new_cache(subject, spec, subject.block_size, 5, "nan")
    target = new_cache(subject, spec, subject.block_size, 6, "large")
    noise = torch.arange(source.tensor.numel(), dtype=torch.int64).mul(7919).remainder(253).to(torch.uint8)
    subject.backend.to_device(noise, source.tensor).wait()
    pairs = [(1, 4), (4, 1), (2, 5)]
    _check_copy(subject, source, target, pairs)
    _check_copy(subject, source, target, [])
    if subject.backend.capabilities.swap:
        host = KVSlab(tensor=_slab(source.layout.block_bytes * 6), layout=source.layout, num_blocks=6)
        _check_copy(subject, source, host, pairs)
        _check_copy(subject, host, target, [(4, 2), (5, 3)])


@check("L0/pack-round-trip", ["fp32", "bf16"])
def test_a_packed_weight_can_be_replaced_in_place(subject: Subject, variant: str) -> None:
    """Shape and scheme are told; update_ takes what tensors() gives, keeps addresses, and refuses other shapes."""
    dtype = {"fp32": DType.FLOAT32, "bf16": DType.BFLOAT16}[variant]
    first, second = (torch.randn(24, 32, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    one, two = (_packed(subject, weight, dtype) for weight in (first, second))
    assert (one.shape, one.scheme) == ((24, 32), "none"), f"shape {one.shape}, scheme {one.scheme!r}"
    assert one.nbytes >= 24 * 32 * dtype.itemsize, f"{one.nbytes} bytes do not hold the weight"
    where = {name: part.data_ptr() for name, part in one.tensors().items()}
    one.update_({name: part.clone() for name, part in two.tensors().items()})
    assert {name: part.data_ptr() for name, part in one.tensors().items()} == where, "update_ moved the weight"
    for name, part in two.tensors().items():
        subject.equal("pack", one.tensors()[name], subject.get(part), f"part {name!r} after update_")
    _must_refuse_update(one)


@check("L0/plan-into")
def test_a_plan_can_be_refreshed_in_place(subject: Subject) -> None:
    """plan(..., into=plan) gives the same object, and attention with it the answer of a fresh plan."""
    op = AttentionOp(
        dtype=DType.FLOAT32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        v_head_dim=64,
        kv_dtype=DType.FLOAT32,
        scale=0.125,
    )
    old = PagedStep(subject, op, [1, 1], [3, subject.block_size + 1], seed=1)
    new = PagedStep(subject, op, [1, 1], [subject.block_size, 2], seed=2)
    plan = old.plan()
    assert new.plan(into=plan) is plan, "plan(into=...) must return the plan that it was given"
    attend, cache, query = subject.bind(op), new.filled_cache(), new.device_query()
    refreshed = subject.get(attend(AttentionArgs(query=query, cache=cache, plan=plan)))
    subject.equal(op, attend(AttentionArgs(query=query, cache=cache, plan=new.plan())), refreshed, "with a fresh plan")


@check("L0/capture-replay")
def test_a_captured_step_reads_its_inputs_anew(subject: Subject) -> None:
    """A replay gives what a call with the present contents of the captured inputs gives."""
    op = RmsNormOp(dtype=DType.FLOAT32, dim=64, eps=1e-6)
    norm = subject.bind(op)
    recorded = subject.binder.bind(op)  # not watched: the watch reads tensors on the host, which no graph can hold
    x, weight = subject.put(torch.ones(3, 64)), subject.put(torch.ones(64))
    graph = subject.backend.capture(lambda: recorded(RmsNormArgs(x=x, weight=weight)), [])
    for seed in range(3):
        fresh = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed))
        subject.backend.to_device(fresh, x).wait()
        expected = subject.get(norm(RmsNormArgs(x=subject.put(fresh), weight=weight)))
        subject.equal(op, graph.replay([]), expected, f"replay {seed}")


def _slab(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _check_views(slab: KVSlab) -> None:
    views = slab.views()
    assert len(views) == len(slab.layout.planes), f"{slab.layout.id}: one view a plane"
    for index, (view, plane) in enumerate(zip(views, slab.layout.planes, strict=True)):
        assert tuple(view.shape) == (slab.num_blocks, *plane.block_shape), f"{slab.layout.id}: view of {plane.name}"
        assert view.dtype == torch_dtype(plane.dtype)
        view.view(torch.uint8).fill_(index + 1)
    for index, view in enumerate(views):
        assert (view.view(torch.uint8) == index + 1).all(), f"{slab.layout.id}: planes overlap"


def _check_copy(subject: Subject, source: KVSlab, target: KVSlab, pairs: list[tuple[int, int]]) -> None:
    expected = [subject.get(view).view(torch.uint8) for view in target.views()]
    for old, view in zip(expected, source.views(), strict=True):
        fresh = subject.get(view).view(torch.uint8)
        for a, b in pairs:
            old[b] = fresh[a]
    subject.backend.copy_blocks(source, target, pairs, subject.backend.fence()).wait()
    for plane, want, view in zip(target.layout.planes, expected, target.views(), strict=True):
        subject.equal("copy_blocks", subject.get(view).view(torch.uint8), want, f"plane {plane.name!r} for {pairs}")


def _packed(subject: Subject, weight: Tensor, dtype: DType) -> Packed:
    return subject.pack({"weight": weight.to(torch_dtype(dtype))}, "none", weight.shape, dtype)


def _must_refuse_update(packed: Packed) -> None:
    parts = {name: part.flatten()[:-1].clone() for name, part in packed.tensors().items()}
    try:
        packed.update_(parts)
    except ValueError:
        return
    raise AssertionError("update_ took parts of another shape; it must raise ValueError and write nothing")
