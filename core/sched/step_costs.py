"""What steps took, and from it how many prompt tokens fit into a given time: the measured cost model of chunks.

A step with prompts takes as long as one without plus `fixed + per_token * tokens + per_pair * pairs`, where a pair is a
prompt token and a token that it attends to, and tokens are those that are paid for (`core.sched.step_sizes`). The three
are fitted to the last steps by least squares; none is negative. Small steps are also remembered by their size.
What a step without prompts takes is the median of the last ones of about as many requests.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from core.sched.step_sizes import StepSizes, paid_size

__all__ = ["StepCosts", "StepLoad"]

_NUM_QUIET = 15
"""Steps without prompts that are remembered for each number of requests: a median of them forgets one slow step."""
_MIN_QUIET = 3
"""Of fewer nothing is concluded: the first step of a size is slow where it is recorded."""
_NUM_MIXED = 64
_REFIT_EVERY = 4
_TOKENS, _PAIRS = 64.0, 64.0 * 1024.0
"""Units that bring the three features of a chunk to about the same size."""
_RIDGE = 0.02
"""Weight of what prompts alone cost, as a share of the steps: it stands where the last steps do not tell."""
_CHEAPEST = 0.25
"""Share of that which a token costs in any case: less is noise."""
_GROWTH = 2
"""How many times as many tokens as in any of the last steps a step may hold: further the model is not trusted."""
_UNSEEN = 256
"""Tokens that a first step of both kinds may hold at most."""
_OUTLIER = 2.0
"""A step that took as many times what the model says, and more, does not count in the second fit."""


_Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes.

    Args:
        num_decodes: Requests with one token.
        num_tokens: Tokens of prompts.
        num_pairs: For each of them the tokens that it attends to, summed up.
    """

    num_decodes: int
    num_tokens: int = 0
    num_pairs: float = 0.0

    @property
    def features(self) -> tuple[float, float, float]:
        """One, tokens and pairs, in units of about the same size."""
        num_paid = paid_size(self.num_decodes + self.num_tokens) - paid_size(self.num_decodes)
        return 1.0, num_paid / _TOKENS, self.num_pairs / _PAIRS


class StepCosts:
    """Learns from every step; O(1) for most of them."""

    def __init__(self) -> None:
        self._quiet: dict[int, deque[float]] = {}
        self._mixed: deque[tuple[StepLoad, float]] = deque(maxlen=_NUM_MIXED)
        self.sizes = StepSizes()
        """Small steps by their size."""
        self._num_new = 0
        self._prior = (0.0, 0.0, 0.0)
        self._costs: tuple[float, float, float] | None = None

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Takes note of a step that took `seconds`, from the end of the one before it to its own end."""
        if not load.num_tokens:
            if load.num_decodes:
                self._quiet.setdefault(_bucket(load.num_decodes), deque(maxlen=_NUM_QUIET)).append(seconds)
            return
        quiet = self.quiet_s(load.num_decodes) if load.num_decodes else 0.0
        if quiet is None:
            return
        if not load.num_decodes:
            # Before anything runs, prompts alone tell what a token costs. A large chunk hides what is fixed.
            per_token = seconds * _TOKENS / load.num_tokens
            known = self._prior[1]
            self._prior = (0.0, per_token if not known else min(per_token, 1.1 * known), 0.0)
        else:
            self._mixed.append((load, max(0.0, seconds - quiet)))
            if quiet:
                self.sizes.observe(load.num_decodes, load.num_tokens, seconds / quiet)
        self._num_new += 1

    def quiet_s(self, num_decodes: int) -> float | None:
        """Seconds of a step of as many requests without prompts; None where too few were seen."""
        wanted = _bucket(num_decodes)
        known = [bucket for bucket, steps in self._quiet.items() if len(steps) >= _MIN_QUIET]
        if not known:
            return None
        return statistics.median(self._quiet[min(known, key=lambda bucket: (abs(bucket - wanted), bucket))])

    def num_tokens_within(self, seconds: float, start: int) -> int | None:
        """Most tokens of a prompt to pay for, from its token `start` on, that make a step longer by at most `seconds`.

        Where a step with prompts takes longer than that whatever it holds, as many as cost so much beside what is
        fixed: fewer would only make more such steps. None where nothing is known yet of what a token costs.
        """
        if self._costs is None or self._num_new >= _REFIT_EVERY:
            self._refit()
        if self._costs is None:
            return None
        fixed, per_token, per_pair = self._costs
        left = seconds - fixed if fixed < seconds else seconds
        most = _GROWTH * max((load.num_tokens for load, _ in self._mixed), default=0) or _UNSEEN
        linear = per_token / _TOKENS + per_pair / _PAIRS * start
        square = per_pair / _PAIRS / 2
        if square * left < 1e-9 * linear * linear:
            return min(most, int(left / linear))
        if square <= 0.0:
            return most
        root: float = (linear * linear + 4 * square * left) ** 0.5
        return min(most, int((root - linear) / (2 * square)))

    def _refit(self) -> None:
        self._num_new = 0
        samples = [(load.features, seconds) for load, seconds in self._mixed]
        if not samples:
            self._costs = self._prior if self._prior[1] else None
            return
        self._costs = self._fitted(samples)

    def _fitted(self, samples: list[tuple[_Vector, float]]) -> _Vector:
        first = _fit(samples, self._prior)
        bounds = [(features, _OUTLIER * _dot(first, features)) for features, _ in samples]
        kept = [sample for sample, (_, bound) in zip(samples, bounds, strict=True) if sample[1] <= bound]
        fixed, per_token, per_pair = _fit(kept, self._prior) if 2 * len(kept) >= len(samples) else first
        return fixed, max(per_token, _CHEAPEST * self._prior[1]), per_pair


def _bucket(num_requests: int) -> int:
    """Numbers of requests between which steps hardly differ: 1, 2, 3 to 4, 5 to 8, ..."""
    return (num_requests - 1).bit_length()


def _dot(a: _Vector, b: _Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _fit(samples: list[tuple[_Vector, float]], believed: _Vector) -> _Vector:
    """Least squares with a pull towards `believed`; a cost that comes out negative is left out and the rest fitted."""
    used = [0, 1, 2]
    while True:
        found = _solve(samples, believed, used)
        negative = [index for index in used if found[index] < 0.0]
        if not negative:
            return found[0], found[1], found[2]
        used.remove(min(negative, key=lambda index: found[index]))


def _solve(samples: list[tuple[_Vector, float]], believed: _Vector, used: list[int]) -> list[float]:
    """Normal equations of the features in `used`, by elimination; 0 for the others."""
    size, ridge = len(used), _RIDGE * len(samples) + _RIDGE
    rows = [
        [sum(x[i] * x[j] for x, _ in samples) + (ridge if i == j else 0.0) for j in used]
        + [sum(x[i] * y for x, y in samples) + ridge * believed[i]]
        for i in used
    ]
    for at in range(size):  # positive definite: no pivoting
        for row in rows[at + 1 :]:
            factor = row[at] / rows[at][at]
            for column in range(at, size + 1):
                row[column] -= factor * rows[at][column]
    values = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][column] * values[column] for column in range(at + 1, size))
        values[at] = (rows[at][size] - known) / rows[at][at]
    found = [0.0, 0.0, 0.0]
    for place, index in enumerate(used):
        found[index] = values[place]
    return found
