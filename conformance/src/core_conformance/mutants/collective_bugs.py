"""Collectives with one bug each, of one rank and of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from core.backend import Backend, CommLimits, Communicator
from core.backend.comm import SingleRank, TorchCommunicator
from core.backend.schemes import raw
from core_conformance.bare import BareBackend
from core_conformance.mutants.backend import Maker, MutantBackend
from core_conformance.mutants.planting import after, before, changed_op
from core_conformance.mutants.variant import Mutant

__all__ = ["MUTANTS"]


class _CountsItselfTwice(SingleRank):
    def all_reduce_(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class _Averages(TorchCommunicator):
    def all_reduce_(self, x: Tensor) -> Tensor:
        total = super().all_reduce_(x)
        return total.div_(self.world) if total.is_floating_point() else total


class _OwnRowsFirst(TorchCommunicator):
    """Gathers with this rank's rows in front."""

    def all_gather(self, x: Tensor) -> Tensor:
        rows = super().all_gather(x)
        return raw(rows).roll(-self.rank * x.shape[0], dims=0).view(rows.dtype)


class _SharesReversed(TorchCommunicator):
    """The sum's rows go to the ranks from the last to the first."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        count = x.shape[0] // self.world
        return super().reduce_scatter(torch.cat(list(reversed(x.split(count)))))


class _LastSenderFirst(TorchCommunicator):
    """Received rows stand in falling order of their ranks."""

    def all_to_all_v(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        out = super().all_to_all_v(x, send_counts, recv_counts)
        return torch.cat(list(reversed(out.split(list(recv_counts)))))


class _RootOfTheWorldsEnd(TorchCommunicator):
    """Broadcasts from the other end of the list."""

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return super().broadcast(x, self.world - 1 - root)


class _ReceivesIntoACopy(TorchCommunicator):
    def recv(self, x: Tensor, source: int) -> Tensor:
        super().recv(x.clone(), source)
        return x


class _With(BareBackend):
    """The reference with other communicators."""

    single: type[SingleRank] = SingleRank
    several: type[TorchCommunicator] = TorchCommunicator

    def comm(self, ranks: Sequence[int], tag: str, limits: CommLimits) -> Communicator:
        made = super().comm(ranks, tag, limits)
        if isinstance(made, TorchCommunicator):
            made.__class__ = self.several
            return made
        return self.single()


class DoublesAlone(_With):
    """See `_CountsItselfTwice`."""

    single = _CountsItselfTwice


class Averages(_With):
    """See `_Averages`."""

    several = _Averages


class OwnRowsFirst(_With):
    """See `_OwnRowsFirst`."""

    several = _OwnRowsFirst


class SharesReversed(_With):
    """See `_SharesReversed`."""

    several = _SharesReversed


class LastSenderFirst(_With):
    """See `_LastSenderFirst`."""

    several = _LastSenderFirst


class OtherRoot(_With):
    """See `_RootOfTheWorldsEnd`."""

    several = _RootOfTheWorldsEnd


class ReceivesIntoACopy(_With):
    """See `_ReceivesIntoACopy`."""

    several = _ReceivesIntoACopy


class DispatchInFrontOfPadding(MutantBackend):
    """Padding of a rank comes before its tokens."""

    makers: ClassVar[Mapping[str, Maker]] = {
        "dispatch": after(lambda op, args, out: tuple(part.roll(op.capacity - len(args.x), 0) for part in out))
    }


class CombinesTheOtherRank(MutantBackend):
    """Each rank gets the rows of the other end of the list."""

    makers: ClassVar[Mapping[str, Maker]] = {
        "combine": before(lambda op, args: dataclasses.replace(args, x=args.x.roll(op.capacity, 0)))
    }


class NormsItsOwnPart(MutantBackend):
    """The sum over the ranks is forgotten."""

    makers: ClassVar[Mapping[str, Maker]] = {"reduce_norm": changed_op(world=lambda op: 1, scatter=lambda op: False)}


_RANKS = ("L1/collectives", "L1/dispatch/two-ranks", "L1/combine/two-ranks", "L1/reduce_norm")


def _mutant(name: str, backend: type[Backend], first: str = "collectives/two-ranks") -> Mutant:
    return Mutant(name=name, level="L1", first=f"L1/{first}", backend=backend, also=_RANKS)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("a world of one counts twice", DoublesAlone, "collectives/single"),
    _mutant("sum divided by the world", Averages),
    _mutant("own rows gathered first", OwnRowsFirst),
    _mutant("shares of a sum reversed", SharesReversed),
    _mutant("rows exchanged from the last rank on", LastSenderFirst),
    _mutant("broadcast from another rank", OtherRoot),
    _mutant("message received into a copy", ReceivesIntoACopy),
    _mutant("padding of a rank before its tokens", DispatchInFrontOfPadding, "dispatch/two-ranks"),
    _mutant("rows of the other rank combined", CombinesTheOtherRank, "combine/two-ranks"),
    _mutant("norm of a rank's own part", NormsItsOwnPart, "reduce_norm/two-ranks"),
)
