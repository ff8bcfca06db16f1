"""What the runner knows of a request beside its tokens and blocks."""

from __future__ import annotations

import hashlib
import os

from core.sampling_params import SamplingParams
from core.sched.output import NewRequest

__all__ = ["RequestState"]

_NONCE = os.urandom(16)


class RequestState:
    """What the runner knows of one request.

    Attributes:
        row: Row in the persistent arrays of `InputBatch`.
        num_tokens: Tokens known to the host; one more may be pending on the device.
        unwritten: The last of these, which are in no row yet: most are never read again, and one by one they are dear.
        seed: Key of the request's random numbers, as int64; stays the same when a preempted request comes back.
    """

    __slots__ = ("num_prompt_tokens", "num_tokens", "params", "request_id", "row", "seed", "unwritten")

    def __init__(self, request: NewRequest, row: int) -> None:
        self.request_id = request.request_id
        self.row = row
        self.params: SamplingParams = request.sampling_params
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_tokens = len(request.token_ids)
        self.unwritten: list[int] = []
        self.seed = _seed(request)


def _seed(request: NewRequest) -> int:
    seed = request.sampling_params.seed
    if seed is None:
        # A fresh seed for each request of this process, and the same one after a preemption.
        seed = int.from_bytes(hashlib.sha256(_NONCE + request.request_id.encode()).digest()[:8], "little")
    return (seed + 2**63) % 2**64 - 2**63
