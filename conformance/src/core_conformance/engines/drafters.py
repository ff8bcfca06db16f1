"""Drafters of the suite: they know the goldens, and say them, something else, or a mixture."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Literal

import numpy.typing as npt

from core_conformance.engines.chance import chance_seed
from core_conformance.engines.goldens import Golden

__all__ = ["GoldenDrafter", "Kind"]

Kind = Literal["perfect", "random", "wrong"]


class GoldenDrafter:
    """Proposes how the golden goes on whose beginning a request is at.

    Args:
        kind: "perfect" says it as it is; "wrong" never says the right token; "random" says right and wrong ones, up to
            a random length, and random ones where it knows no golden.
        goldens: What it knows.
    """

    def __init__(self, kind: Kind, goldens: Iterable[Golden]) -> None:
        self._kind = kind
        self._whole = [(*golden.prompt, *golden.tokens) for golden in goldens]
        self.num_proposed = 0
        """Drafts that were proposed, before the engine cut them."""

    def draft(self, request_id: str, token_ids: npt.NDArray[Any]) -> list[int]:
        """See `core.exec.drafts.Drafter`."""
        known = tuple(token_ids.tolist())
        rest = next((list(w[len(known) :]) for w in self._whole if w[: len(known)] == known), [])
        if self._kind == "wrong":
            rest = [(token + 1) % 256 for token in rest]
        elif self._kind == "random":
            rest = _mixed(rest, known)
        self.num_proposed += len(rest)
        return rest


def _mixed(rest: list[int], known: tuple[int, ...]) -> list[int]:
    """The same for the same tokens, wherever and whenever it is asked."""
    dice = random.Random(f"{chance_seed()} {known}")
    wide = rest or [dice.randrange(256) for _ in range(3)]
    return [token if dice.random() < 0.7 else dice.randrange(256) for token in wide[: dice.randrange(5)]]
