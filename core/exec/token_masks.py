"""Which tokens a request may say next, where more than its sampling parameters decides: a grammar, a schema."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["TokenMasks", "mask_words"]


class TokenMasks(Protocol):
    """Answers for the constrained requests of an engine.

    An answer follows from the tokens alone, and so do chunks, preemption and refused drafts need no undoing: whoever
    keeps a parser's state beside a request must be able to go back.
    """

    def constrains(self, request_id: str) -> bool:
        """Whether `allowed` has anything to say of this request; the same answer through its life."""
        ...

    def allowed(self, request_id: str, output_token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32] | None:
        """Bits of the tokens that may follow.

        Args:
            request_id: A request for which `constrains` is true.
            output_token_ids: [n], int32: its output so far. Read-only, and gone after the call. The last ones may be
                drafts that were not allowed: any answer will do for these, nobody reads it.

        Returns:
            [mask_words(vocab_size)], int32, as `apply_token_bitmask` takes them: bit v % 32 of word v // 32 allows
            token v. None allows all.
        """
        ...


def mask_words(vocab_size: int) -> int:
    """Words of a bitmask."""
    return -(-vocab_size // 32)
