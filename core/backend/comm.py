"""Communication between ranks: the `Communicator` that operations and the core call, one rank's and torch's."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CommLimits", "Communicator", "SingleRank", "TorchCommunicator"]


@dataclass(frozen=True, kw_only=True)
class CommLimits:
    """Bounds that let a backend reserve its buffers at start.

    Args:
        max_bytes: Largest message.
        dtypes: Element types that will be reduced.
    """

    max_bytes: int = 0
    dtypes: tuple[torch.dtype, ...] = ()


class Communicator(abc.ABC):
    """Collectives over a fixed list of ranks, stream-ordered like any other operation of the device.

    Every method is called by all ranks in the same order with equal shapes (but `all_to_all_v`).

    Attributes:
        rank: This rank's position in the list.
        world: Length of the list.
    """

    rank: int
    world: int

    @abc.abstractmethod
    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sums `x` over the ranks, in place, and returns it. Rank order of the sum is fixed."""

    @abc.abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """[world * n, ...] from each rank's [n, ...], in rank order."""

    @abc.abstractmethod
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's [n, ...] share of the sum of everyone's [world * n, ...]."""

    @abc.abstractmethod
    def all_to_all_v(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        """Rows of `x` go to the ranks in order, send_counts[r] of them; [sum(recv_counts), ...] come back."""

    @abc.abstractmethod
    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """Overwrites `x` with the root's and returns it."""

    @abc.abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Sends `x` to rank `to`; matched by `recv` there."""

    @abc.abstractmethod
    def recv(self, x: Tensor, source: int) -> Tensor:
        """Overwrites `x` with what rank `source` sent and returns it."""

    def close(self) -> None:
        """Frees what the communicator holds. Idempotent."""


class SingleRank(Communicator):
    """A world of one: every collective is the identity."""

    rank = 0
    world = 1

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x

    def all_to_all_v(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        assert list(send_counts) == list(recv_counts) == [x.shape[0]]
        return x

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        assert root == 0
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError(f"a world of one has no rank {to} to send to")

    def recv(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError(f"a world of one has no rank {source} to receive from")


class TorchCommunicator(Communicator):
    """Collectives over a torch process group.

    Element types that the group cannot carry (8-bit floats) are moved as bytes; they cannot be reduced. A group of gloo
    carries tensors of the host alone: those of a device go through host memory, slowly, whatever the device.

    Args:
        group: The process group of exactly these ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._over_host = dist.get_backend(group) == "gloo"
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def all_reduce_(self, x: Tensor) -> Tensor:
        sent = self._sent(x)
        dist.all_reduce(sent, group=self._group)
        return _arrived(sent, x)

    def all_gather(self, x: Tensor) -> Tensor:
        sent = self._sent(x.contiguous())
        out = sent.new_empty((self.world * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(_bytes(out), _bytes(sent), group=self._group)
        return out.to(x.device)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        sent = self._sent(x.contiguous())
        out = sent.new_empty((x.shape[0] // self.world, *x.shape[1:]))
        dist.reduce_scatter_tensor(out, sent, group=self._group)
        return out.to(x.device)

    def all_to_all_v(self, x: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Tensor:
        sent = self._sent(x.contiguous())
        out = sent.new_empty((sum(recv_counts), *x.shape[1:]))
        dist.all_to_all_single(_bytes(out), _bytes(sent), list(recv_counts), list(send_counts), group=self._group)
        return out.to(x.device)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        sent = self._sent(x)
        dist.broadcast(_bytes(sent), src=dist.get_global_rank(self._group, root), group=self._group)
        return _arrived(sent, x)

    def send(self, x: Tensor, to: int) -> None:
        sent = self._sent(x.contiguous())
        dist.send(_bytes(sent), dst=dist.get_global_rank(self._group, to), group=self._group)

    def recv(self, x: Tensor, source: int) -> Tensor:
        sent = self._sent(x)
        dist.recv(_bytes(sent), src=dist.get_global_rank(self._group, source), group=self._group)
        return _arrived(sent, x)

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _sent(self, x: Tensor) -> Tensor:
        """`x` where the group can reach it: itself, or a copy on the host."""
        return x.to("cpu") if self._over_host else x


def _arrived(sent: Tensor, x: Tensor) -> Tensor:
    """`x`, with what came into `sent` where that is a copy."""
    return x if sent is x else x.copy_(sent)


def _bytes(x: Tensor) -> Tensor:
    """The same memory under a type that every process group carries."""
    return x.view(torch.uint8) if x.element_size() == 1 and x.is_floating_point() else x
