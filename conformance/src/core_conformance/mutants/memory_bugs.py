"""Backends whose memory, copies, layouts, weights, plans or graphs break a promise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import (
    Arena,
    Batch,
    Graph,
    GroupSpec,
    KVLayout,
    KVSlab,
    MemoryInfo,
    OpenConfig,
    Packed,
    Pending,
    Plan,
    Role,
    Scheme,
    WeightSource,
)
from core.spec import KVCacheSpec
from core_conformance.bare import BareBackend
from core_conformance.mutants.device_bugs import backend_bug
from core_conformance.mutants.variant import Mutant

__all__ = ["MUTANTS"]


# -- memory and copies -------------------------------------------------------------------------------------------------


class MoreFreeThanTotal(BareBackend):
    """Counts reserved memory as free."""

    def memory(self) -> MemoryInfo:
        memory = super().memory()
        return MemoryInfo(free=memory.total + 4096, total=memory.total, reserved=0, peak=0)


class ArenaOfWholePages(BareBackend):
    """Reserves whole pages and hands all of it out."""

    def arena(self, tag: str, reserve_bytes: int) -> Arena:
        return super().arena(tag, -(-reserve_bytes // 4096) * 4096)


class _ForgetfulArena(Arena):
    """After `restore` the tensor is another one than the arena's own."""

    __slots__ = ()

    def restore(self) -> Tensor:
        return super().restore().clone()


class RestoresAnotherTensor(BareBackend):
    """See `_ForgetfulArena`."""

    def arena(self, tag: str, reserve_bytes: int) -> Arena:
        return _ForgetfulArena(super().arena(tag, reserve_bytes).tensor, tag)


class _Late(Pending):
    """Says that it is done before it is."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work


class AnswersBeforeItIsDone(BareBackend):
    """`to_host` starts a copy; whoever waits for it does not wait."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        host = torch.zeros_like(tensor, device="cpu")
        return host, _Late(lambda: host.copy_(tensor))


class ReadsTheSourceLater(BareBackend):
    """`to_device` says that it is done, and reads its source when the result is asked for."""

    def open(self, index: int, config: OpenConfig) -> None:
        super().open(index, config)
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        self._waiting.append((src, dst))
        return Pending()

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        self._flush()
        return super().to_host(tensor)

    def _flush(self) -> None:
        for src, dst in self._waiting:
            dst.copy_(src)
        self._waiting.clear()


class FenceOfTheHost(BareBackend):
    """Copies run in a queue that its fence knows nothing of; only the copy's own Pending empties it."""

    def open(self, index: int, config: OpenConfig) -> None:
        super().open(index, config)
        self._queue: list[tuple[Tensor, Tensor]] = []

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        self._queue.append((src, dst))
        return _Flushed(self._queue)


class _Flushed(Pending):
    def __init__(self, queue: list[tuple[Tensor, Tensor]]) -> None:
        self._queue = queue

    def done(self) -> bool:
        return not self._queue

    def wait(self) -> None:
        for src, dst in self._queue:
            dst.copy_(src)
        self._queue.clear()


class CopiesWholeWords(BareBackend):
    """Copies in units of 8 bytes and leaves the rest."""

    def to_device(self, src: Tensor, dst: Tensor) -> Pending:
        whole = src.numel() * src.element_size() // 8 * 8 // src.element_size()
        dst.zero_().flatten()[:whole].copy_(src.flatten()[:whole])
        return Pending()


class CopiesKeysOnly(BareBackend):
    """`copy_blocks` moves the first plane."""

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        for a, b in pairs:
            dst.views()[0][b] = src.views()[0][a]
        return self.fence()


class PairsReversed(BareBackend):
    """`copy_blocks` takes the sources from the last to the first."""

    def copy_blocks(self, src: KVSlab, dst: KVSlab, pairs: Sequence[tuple[int, int]], after: Pending) -> Pending:
        turned = [(source, target) for (source, _), (_, target) in zip(reversed(pairs), pairs, strict=True)]
        return super().copy_blocks(src, dst, turned, after)


class OneLayoutName(BareBackend):
    """Layouts of every shape have one id."""

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        layout = super().kv_layout(spec, block_size)
        return KVLayout(id="canonical/any", planes=layout.planes, block_size=layout.block_size)


class LayoutKnowsOpen(BareBackend):
    """The layout is known once the device is open; before it is another one."""

    def kv_layout(self, spec: KVCacheSpec, block_size: int) -> KVLayout:
        layout = super().kv_layout(spec, block_size)
        name = layout.id if hasattr(self, "device") else f"{layout.id}/closed"
        return KVLayout(id=name, planes=layout.planes, block_size=layout.block_size)


# -- weights, plans and graphs -----------------------------------------------------------------------------------------


class _MovesOnUpdate(Packed):
    """`update_` keeps the new tensors in place of the old ones."""

    __slots__ = ()

    def update_(self, weights: Mapping[str, Tensor]) -> None:
        super().update_(weights)
        self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}


class _TakesAnyShape(Packed):
    """`update_` writes what fits."""

    __slots__ = ()

    def update_(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            new = weights[name].flatten()
            tensor.view(-1)[: len(new)].copy_(new)


class MovesWeights(BareBackend):
    """See `_MovesOnUpdate`."""

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        packed = super().pack(source, scheme, role, dtype)
        return _MovesOnUpdate(shape=packed.shape, scheme=packed.scheme, tensors=packed.tensors())


class TakesWeightsOfAnyShape(BareBackend):
    """See `_TakesAnyShape`."""

    def pack(self, source: WeightSource, scheme: Scheme, role: Role, dtype: torch.dtype) -> Packed:
        packed = super().pack(source, scheme, role, dtype)
        return _TakesAnyShape(shape=packed.shape, scheme=packed.scheme, tensors=packed.tensors())


class KeepsOldLengths(BareBackend):
    """A plan that a graph has captured takes the new step, and of its lengths only those that shrink."""

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        if into is None:
            return super().plan(batch, group)
        old, new = into.group, batch.groups[group.index]
        host = [min(pair) for pair in zip(old.seq_lens_host, new.seq_lens_host, strict=True)]
        into.batch = batch
        into.group = dataclasses.replace(new, seq_lens=torch.minimum(old.seq_lens, new.seq_lens), seq_lens_host=host)
        return into


class MakesANewPlan(BareBackend):
    """A refreshed plan is a new one, which no graph knows."""

    def plan(self, batch: Batch, group: GroupSpec, into: Plan | None = None) -> Plan:
        return super().plan(batch, group)


class _Recorded(Graph):
    """Gives the result of the recording."""

    __slots__ = ("_result",)

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(fn)
        self._result = fn()

    def replay(self, plans: Sequence[Plan]) -> Any:
        return self._result


class ReplaysTheResult(BareBackend):
    """See `_Recorded`."""

    def capture(self, fn: Callable[[], Any], plans: Sequence[Plan]) -> Graph:
        return _Recorded(fn)


MUTANTS: tuple[Mutant, ...] = (
    backend_bug("more memory free than there is", "memory", MoreFreeThanTotal),
    backend_bug("arena of whole pages", "arena-round-trip", ArenaOfWholePages),
    backend_bug("restored arena is another tensor", "arena-round-trip", RestoresAnotherTensor),
    backend_bug("to_host answers before it is done", "copy-round-trip", AnswersBeforeItIsDone),
    backend_bug("to_device reads its source later", "copy-round-trip", ReadsTheSourceLater),
    backend_bug("copies whole words", "copy-round-trip", CopiesWholeWords),
    backend_bug("fence knows nothing of copies", "fence", FenceOfTheHost),
    backend_bug("copies the first plane of blocks", "copy-blocks", CopiesKeysOnly),
    backend_bug("sources of copied blocks reversed", "copy-blocks", PairsReversed),
    backend_bug("one id for every layout", "kv-layout", OneLayoutName),
    backend_bug("layout changes with open", "kv-layout", LayoutKnowsOpen),
    backend_bug("updated weight moves", "pack-round-trip", MovesWeights),
    backend_bug("update of any shape", "pack-round-trip", TakesWeightsOfAnyShape),
    backend_bug("refreshed plan keeps lengths", "plan-into", KeepsOldLengths),
    backend_bug("refreshed plan is another object", "plan-into", MakesANewPlan),
    backend_bug("replay gives the recorded result", "capture-replay", ReplaysTheResult),
)
