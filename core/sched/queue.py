"""Requests that wait to run, in the order in which they will be asked."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Literal

from core.request import Request

__all__ = ["OrderKey", "WaitingQueue", "order_key"]

OrderKey = Callable[[Request], tuple[Any, ...]]
"""Key of a request that is unique and never changes; smaller runs earlier and is preempted later."""


def _arrival_key(request: Request) -> tuple[int]:
    return (request.arrival_index,)


def order_key(policy: Literal["fcfs", "priority"]) -> OrderKey:
    """The order of a scheduling policy: arrival, or priority (lower first) and then arrival."""
    return Request.sort_key if policy == "priority" else _arrival_key


class WaitingQueue:
    """Waiting requests in the order of a key. A preempted request returns to its old place.

    Args:
        key: Order of the requests.
    """

    def __init__(self, key: OrderKey) -> None:
        self._key = key
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Requests in order; the queue must not change meanwhile."""
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = self._index(request)
        return index < len(self._requests) and self._requests[index] is request

    def add(self, request: Request) -> None:
        """Puts a request in its place; O(1) at the end."""
        if not self._requests or self._key(self._requests[-1]) < self._key(request):
            self._requests.append(request)
        else:
            insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        """Takes out a request that is in the queue."""
        assert request in self, f"{request} does not wait"
        del self._requests[self._index(request)]

    def _index(self, request: Request) -> int:
        return bisect_left(self._requests, self._key(request), key=self._key)
