"""Speculation as the runner sees it: who proposes draft tokens, and how many of them stay."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Drafter", "Proposer", "count_accepted"]

logger = logging.getLogger("core.engine")


class Drafter(Protocol):
    """Proposes tokens that may follow those of a request.

    Drafts change how many tokens a step gives, and never which: each draft is compared with the token that is drawn
    at its position, from the same logits and with the same random numbers as without a drafter.
    """

    def draft(self, request_id: str, token_ids: npt.NDArray[np.int32]) -> Sequence[int]:
        """Tokens to be verified in the request's next step; none where there is nothing to propose.

        Called once for each request that gained a token in a step, when the step's result is taken: on one thread at
        a time, and not always the same. Where it raises, the request goes on without drafts.

        Args:
            request_id: The request; it may be gone by the next call.
            token_ids: [n], int32: prompt and output so far. Read-only, and gone after the call.

        Returns:
            Proposed ids. Cut to `SchedulerConfig.num_spec_tokens`, and before the first that is not in the vocabulary.
        """
        ...


class Proposer:
    """Asks a drafter, and keeps what it says within bounds.

    Args:
        drafter: The drafter.
        num_spec_tokens: Most draft tokens of a request in a step.
        vocab_size: Ids that may be drafted.
    """

    def __init__(self, drafter: Drafter, num_spec_tokens: int, vocab_size: int) -> None:
        self._drafter = drafter
        self._num_spec_tokens = num_spec_tokens
        self._vocab_size = vocab_size

    def propose(self, request_id: str, token_ids: npt.NDArray[np.int32]) -> list[int]:
        """Drafts that the scheduler may take; none where the drafter fails, since they only save time."""
        try:
            drafts = self._drafter.draft(request_id, token_ids)[: self._num_spec_tokens]
            return list(takewhile(lambda token_id: 0 <= token_id < self._vocab_size, drafts))
        except Exception:
            logger.exception("the drafter failed for request %s; it goes on without drafts", request_id)
            return []


def count_accepted(draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> int:
    """Leading drafts that are what was drawn in their place.

    Args:
        draft_token_ids: [k].
        sampled_token_ids: [k + 1]: entry i was drawn behind the first i drafts; entries past the first wrong draft
            mean nothing.
    """
    for index, token_id in enumerate(draft_token_ids):
        if sampled_token_ids[index] != token_id:
            return index
    return len(draft_token_ids)
