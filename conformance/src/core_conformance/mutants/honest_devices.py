"""Backends that are right and keep caches, weights, plans and copies in a way of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.backend import (
    Batch,
    GroupSpec,
    KVLayout,
    KVSlab,
    OpenConfig,
    Packed,
    Pending,
    Plan,
    Plane,
    Role,
    Scheme,
    WeightSource,
    canonical_layout,
    torch_dtype,
)
from core.backend.ops import AttentionArgs, AttentionOp, LinearArgs, LinearOp
from core.spec import Capabilities, KVCacheSpec
from core_conformance.bare import BareBackend
from core_conformance.mutants.backend import Maker, MutantBackend
from core_conformance.mutants.variant import Honest
from core_conformance.subject import oracle

__all__ = ["HONEST"]


# -- a layout of its own -----------------------------------------------------------------------------------------------

_PRIVATE = "transposed/"


def _token_major(planes: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of private planes [blocks, heads, dim, size] as canonical ones [blocks, size, heads, dim]."""
    return tuple(plane.permute(0, 3, 1, 2).contiguous() for plane in planes)


def _through_a_copy(*, writes: bool) -> Maker:
    """The reference over a token-major copy of the planes, which comes back where the operation writes."""

    def make(op: Any) -> Callable[[Any], Any]:
        layout = getattr(op, "layout", None)
        if layout is not None and layout.canonical:
            return oracle(op)
        run = oracle(op if layout is None else _canonical(op))

        def call(args: Any) -> Any:
            if args.cache is None or not _is_private(args):
                return run(args)
            copies = _token_major(args.cache)
            result = run(_with_cache(args, copies))
            if writes:
                for plane, copy in zip(args.cache, copies, strict=True):
                    plane.copy_(copy.permute(0, 2, 3, 1))
            return result

        return call

    return make


def _canonical(op: Any) -> Any:
    layout = op.layout
    planes = tuple(
        Plane(name=p.name, dtype=p.dtype, block_shape=(p.block_shape[2], *p.block_shape[:2]), head_axis=1)
        for p in layout.planes
    )
    return dataclasses.replace(
        op, layout=KVLayout(id=f"canonical/{layout.id}", planes=planes, block_size=layout.block_size)
    )


def _with_cache(args: Any, cache: tuple[Tensor, ...]) -> Any:
    return dataclasses.replace(args, cache=cache)


def _is_private(args: Any) -> bool:
    plan = getattr(args, "plan", None)
    return plan is None or plan.spec.layout.id.startswith(_PRIVATE)


class TransposedBlocks(MutantBackend):
    """Keys and values of a block lie [heads, dim, tokens]; all that touches them is its own."""

    makers: ClassVar[Mapping[str, Maker]] = {
        "kv_write": _through_a_copy(writes=True),
        "attention": _through_a_copy(writes=False),
        "export_blocks": _through_a_copy(writes=False),
        "import_blocks": _through_a_copy(writes=True),
        "move_tokens": _through_a_copy(writes=True),
    }

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        layout = canonical_layout(spec, block_size)
        if len(layout.planes) != 2 or layout.planes[0].name != "key":
            return layout
        planes = tuple(
            Plane(name=p.name, dtype=p.dtype, block_shape=(*p.block_shape[1:], block_size), head_axis=0)
            for p in layout.planes
        )
        return KVLayout(id=layout.id.replace("canonical/", _PRIVATE), planes=planes, block_size=block_size)


# -- weights with padding ----------------------------------------------------------------------------------------------


class _PaddedWeight(Packed):
    """Rows of a dense weight, filled up with zeros to whole tiles of 48 columns."""

    __slots__ = ()

    def dense(self) -> Tensor:
        return self.tensors()["tiles"][:, : self.shape[1]]


def _padded_product(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
    if op.scheme != "none":
        return oracle(op)

    def linear(args: LinearArgs) -> Tensor:
        assert isinstance(args.x, Tensor)
        weight = args.weight.tensors().get("tiles", args.weight.dense()).float()
        x = torch.nn.functional.pad(args.x.float(), (0, weight.shape[1] - args.x.shape[1]))
        total = x @ weight.T
        return (total if args.bias is None else total + args.bias.float()).to(torch_dtype(op.out_dtype))

    return linear


class PaddedWeights(MutantBackend):
    """Keeps dense weights in whole tiles."""

    makers: ClassVar[Mapping[str, Maker]] = {"linear": _padded_product}

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        packed = super().pack(source, scheme, role, dtype)
        if packed.scheme != "none" or len(packed.shape) != 2:
            return packed
        tiles = torch.nn.functional.pad(packed.dense(), (0, -packed.shape[1] % 48)).contiguous()
        return _PaddedWeight(shape=packed.shape, scheme="none", tensors={"tiles": tiles})


# -- other block sizes, plans and copies -------------------------------------------------------------------------------


class LargeBlocks(BareBackend):
    """Prefers blocks of 32 tokens, and takes 8 as well."""

    def open(self, index: int, config: OpenConfig) -> None:
        super().open(index, config)
        self.capabilities = Capabilities(block_sizes=(32, 8))


@dataclass(slots=True, kw_only=True)
class _Listed(Plan):
    """A plan with what its attention reads of it: for each request its queries, keys and blocks."""

    work: list[tuple[int, int, int, list[int]]] = field(default_factory=list)


def _listed_attention(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    """Attention that knows a step from the list of its plan alone."""
    if op.features or not op.causal or op.kv_dtype is not op.dtype:
        return oracle(op)
    repeat = op.num_heads // op.num_kv_heads

    def attention(args: AttentionArgs) -> Tensor:
        assert args.cache is not None and isinstance(args.plan, _Listed)
        out = args.query.new_zeros((*args.query.shape[:2], op.v_head_dim))
        for start, end, length, blocks in args.plan.work:
            slots = [b * args.plan.block_size + i for b in blocks for i in range(args.plan.block_size)][:length]
            real = torch.tensor([slot >= args.plan.block_size for slot in slots])
            key, value = (plane.flatten(0, 1)[torch.tensor(slots)].float() for plane in args.cache)
            key, value = (torch.where(real[:, None, None], x, 0.0).repeat_interleave(repeat, 1) for x in (key, value))
            at, position = torch.arange(length), torch.arange(length - (end - start), length)[:, None]
            seen = real & (at <= position) & (at > position - (op.window or length + 1))
            logits = torch.einsum("qhd,khd->hqk", args.query[start:end].float(), key) * op.scale
            if op.softcap:
                logits = op.softcap * torch.tanh(logits / op.softcap)
            weights = torch.softmax(torch.where(seen, logits, -torch.inf), -1).nan_to_num()
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)
        return out

    return attention


class ListsItsWork(MutantBackend):
    """Reads lengths and tables once a step, into a plan of its own."""

    makers: ClassVar[Mapping[str, Maker]] = {"attention": _listed_attention}

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        part = batch.groups[group.index]
        if into is None:
            into = _Listed(batch=batch, group=part, spec=group, block_size=group.layout.block_size)
        assert isinstance(into, _Listed)
        into.batch, into.group = batch, part
        starts, lens, tables = batch.query_start_loc_host, part.seq_lens.tolist(), part.block_table.tolist()
        into.work = [
            (starts[row], starts[row + 1], lens[row], tables[row][: -(-lens[row] // into.block_size)])
            for row in range(batch.num_reqs)
            if starts[row + 1] > starts[row]
        ]
        return into


class _Deferred(Pending):
    """A copy that is made when somebody waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work

    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class CopiesLate(BareBackend):
    """Copies to the host are made when somebody waits for them, from what the device held when they were asked for."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        then, host = tensor.clone(), torch.full_like(tensor, 77 if tensor.dtype != torch.bool else 1, device="cpu")
        return host, _Deferred(lambda: host.copy_(then))

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        after.wait()
        then = KVSlab(tensor=src.tensor.clone(), layout=src.layout, num_blocks=src.num_blocks)
        copy = super().copy_blocks
        return _Deferred(lambda: copy(then, dst, pairs, Pending()))


_DENSE = ("L1/linear", "L1/embed")
_BLOCKS = ("L1/import_blocks", "L1/export_blocks", "L1/move_tokens")
_PAGED = ("L1/attention", "L1/kv_write")
_ENGINE = ("L2", "L3/greedy", "L3/preemption/swap", "L3/prefix-cache/warm")

HONEST: tuple[Honest, ...] = (
    Honest(
        name="blocks transposed in a private layout",
        backend=TransposedBlocks,
        heads=("L0", *_PAGED, "L1/qk_norm_rope_write", *_BLOCKS, *_ENGINE),
    ),
    Honest(name="weights in padded tiles", backend=PaddedWeights, heads=("L0", *_DENSE, "L2", "L3/greedy")),
    Honest(
        name="blocks of 32 tokens",
        backend=LargeBlocks,
        heads=("L0", *_PAGED, *_ENGINE, "L3/chunks"),
    ),
    Honest(name="plan with lists of its own", backend=ListsItsWork, heads=("L0", "L1/attention", "L2", "L3/greedy")),
    Honest(name="copies made when waited for", backend=CopiesLate, heads=("L0", "L3/greedy", "L3/preemption/swap")),
)
