"""Every live request, where it is, and what the runner knows of it."""

from __future__ import annotations

from core.outputs import FinishReason
from core.request import Request, RequestStatus
from core.sched.queue import OrderKey, WaitingQueue

__all__ = ["RequestRegistry"]


class RequestRegistry:
    """Live requests; each either waits or runs.

    Args:
        key: Order in which requests start, and, from its end, are preempted.
    """

    def __init__(self, key: OrderKey) -> None:
        self.key = key
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(key)
        self.running: dict[str, Request] = {}
        self._known_to_runner: set[str] = set()
        self._dropped: list[str] = []
        self._num_arrived = 0

    def add(self, request: Request) -> None:
        """Takes up a new request; it waits."""
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def start(self, request: Request) -> None:
        """Makes a request run, and the runner know it. The caller, who may be reading `waiting`, takes it out there."""
        request.status = RequestStatus.RUNNING
        request.num_output_at_start = request.num_output_tokens
        self.running[request.request_id] = request
        self._known_to_runner.add(request.request_id)

    def suspend(self, request: Request, status: RequestStatus) -> None:
        """Makes a running request wait again, as PREEMPTED or SWAPPED; the runner forgets it."""
        del self.running[request.request_id]
        request.status = status
        request.draft_token_ids = ()
        request.num_preemptions += 1
        self._drop(request)
        self.waiting.add(request)

    def remove(self, request: Request, reason: FinishReason) -> None:
        """Ends a request, wherever it is; the runner forgets it."""
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
        else:
            self.waiting.remove(request)
        del self.requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        self._drop(request)

    @property
    def num_dropped(self) -> int:
        """Requests that the runner is still to be told to forget."""
        return len(self._dropped)

    def take_dropped(self) -> list[str]:
        """Ids that the runner may forget; each is given out once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check_integrity(self) -> None:
        """Asserts that each request is in one place and has the status of that place."""
        waiting = {request.request_id: request for request in self.waiting}
        assert not waiting.keys() & self.running.keys(), "a request waits and runs"
        assert {**waiting, **self.running} == self.requests, "a request neither waits nor runs"
        assert self.running.keys() == self._known_to_runner, "the runner knows others than those that run"
        for request in self.requests.values():
            running = request.request_id in self.running
            assert running == (request.status is RequestStatus.RUNNING), f"{request} has the wrong status"
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                assert request.num_computed_tokens == 0, f"{request} waits with computed tokens"

    def _drop(self, request: Request) -> None:
        if request.request_id in self._known_to_runner:
            self._known_to_runner.remove(request.request_id)
            self._dropped.append(request.request_id)
