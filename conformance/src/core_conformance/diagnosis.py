"""What the pattern of wrong elements says of the fault: the last part of every message of a failed comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Evidence", "Places", "Suspects", "diagnose", "known", "logit_factor"]

Suspects = Callable[[Tensor], Mapping[str, Tensor]]
"""Gives what known faults would have answered, a few words to a result; it is called on a failure with what came."""

_POISON_FACTOR = 50.0
"""A value this many times beyond everything that is expected was not computed from what the request owns."""
_COARSEST = 2.0**-7
"""Rounding that an answer of a known fault is granted where the bound itself is zero: that of bfloat16."""
_SMALL_RATIO = 8.0
"""Errors up to this many bounds, everywhere, are a matter of rounding."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the rows of a result stand in their requests.

    Args:
        requests: Request of each row.
        positions: Position of each row in its request.
        block_size: Tokens a KV block; 0 where there is no cache.
        window: Keys that a query may see; 0 for all.
    """

    requests: Sequence[int]
    positions: Sequence[int]
    block_size: int = 0
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A comparison that failed.

    Args:
        got: What came, float64.
        ref: What is right, float64, shape of `got`.
        bound: What error is allowed, shape of `got`.
        wrong: Which elements are wrong, bool, shape of `got`; one at least.
        places: Where the rows stand; None where that says nothing.
        suspects: Answers of known faults.
    """

    got: Tensor
    ref: Tensor
    bound: Tensor
    wrong: Tensor
    places: Places | None = None
    suspects: Suspects | None = None

    def matches(self, other: Tensor) -> bool:
        """Whether `other`, rounded as the result may be, explains every element."""
        share = (self.bound / self.ref.abs())[self.ref.abs() > 0]
        rounding = min(float(share.median()), _COARSEST) if share.numel() else 0.0
        same = (self.got - other).abs() <= self.bound + rounding * other.abs() + 1e-12
        same |= (self.got == other) | (self.got.isnan() & other.isnan())
        return bool(same.all()) and not bool((other == self.ref).all())

    def along(self, axis: int) -> Tensor:
        """[size of the axis], bool: where anything is wrong."""
        others = [dim for dim in range(self.wrong.dim()) if dim != axis % self.wrong.dim()]
        return self.wrong.any(dim=others) if others else self.wrong


def diagnose(evidence: Evidence) -> str:
    """The likely kind of fault, a colon and what shows it; empty where the pattern says nothing."""
    for found in _findings(evidence):
        if found:
            return found
    return ""


def known(answers: Mapping[str, Tensor]) -> Suspects:
    """Suspects whose answers are there already."""
    return lambda got: answers


def logit_factor(shares: tuple[float, float], gap: float) -> float:
    """By which factor logits were scaled that should differ by `gap`, from the shares of the two keys; nan if none."""
    low, high = shares
    if not (low > 0 and high > 0 and gap):
        return float("nan")
    return float(torch.tensor(high / low, dtype=torch.float64).log()) / gap


def _findings(e: Evidence) -> Iterator[str]:
    """Every explanation that is tried, the most certain first."""
    yield _suspect(e)
    yield _poison(e)
    if not bool(e.got.isfinite().all()):
        return
    yield _missing(e)
    yield _factor(e)
    yield _offset(e)
    if e.wrong.dim() >= 3:
        yield _other_heads(e)
    yield _shifted_rows(e)
    if e.places is not None and len(e.places.positions) == len(e.wrong):
        yield from _by_place(e, e.places)
    yield _head_subset(e)
    yield _tails(e)
    yield _order(e)
    if int(e.wrong.sum()) == 1 < e.wrong.numel():
        yield "one element: all others are right"
    yield _rounding(e)


def _suspect(e: Evidence) -> str:
    for name, other in (e.suspects(e.got) if e.suspects is not None else {}).items():
        if other.shape == e.ref.shape and e.matches(other.double()):
            return name
    return ""


def _poison(e: Evidence) -> str:
    honest = e.ref[e.ref.isfinite()].abs()
    largest = float(honest.max()) if honest.numel() else 1.0
    slack = float(e.bound[e.bound.isfinite()].max()) if e.bound.isfinite().any() else 0.0
    strange = e.wrong & e.ref.isfinite()
    if bool((strange & e.got.isnan()).any()):
        return "poison: NaN came through; it reads memory that nobody owns, or a sum without its largest term taken off"
    if bool((strange & ~e.got.isfinite()).any()):
        return "overflow: infinity came through; an intermediate result does not fit its type"
    if bool((strange & (e.got.abs() > _POISON_FACTOR * (largest + slack) + 1)).any()):
        value = float(e.got[strange].abs().max())
        return f"poison: {value:.3g} came through, far beyond every value; it reads memory that nobody owns"
    return ""


def _missing(e: Evidence) -> str:
    there = e.wrong & (e.ref.abs() > e.bound)
    if int(there.sum()) < 2 or not bool((e.got[there] == 0).all()) or not bool((there == e.wrong).all()):
        return ""
    return f"nothing written: the {int(e.wrong.sum())} wrong elements are zero"


def _factor(e: Evidence) -> str:
    """One factor that explains everything."""
    clear = e.ref.isfinite() & (e.ref.abs() > 4 * e.bound)
    if int(clear.sum()) < 2 or int(e.wrong.sum()) < 2:
        return ""
    ref, got = e.ref[clear], e.got[clear]
    factor = float((got * ref).sum() / ref.square().sum())
    if factor == 0 or not bool(((e.got - factor * e.ref).abs() <= (1 + abs(factor)) * e.bound + 1e-12).all()):
        return ""
    spread = float(((got / ref) - factor).abs().max())
    return "" if spread >= abs(factor - 1) else f"scale: everything is multiplied by {factor:.4g}"


def _offset(e: Evidence) -> str:
    if e.got.numel() < 4 or not bool(e.wrong.all()):
        return ""
    added = float((e.got - e.ref).median())
    same = ((e.got - e.ref - added).abs() <= 2 * e.bound + 1e-12).all()
    return f"offset: {added:.4g} is added to everything" if bool(same) and float(e.bound.max()) < abs(added) else ""


def _other_heads(e: Evidence) -> str:
    """Heads that hold exactly what other heads should."""
    pairs = []
    for head in torch.where(e.along(1))[0].tolist():
        twins = [
            other
            for other in range(e.ref.shape[1])
            if other != head and bool(((e.got[:, head] - e.ref[:, other]).abs() <= e.bound[:, other] + 1e-12).all())
        ]
        if not twins:
            return ""
        pairs.append(f"head {head} shows head {twins[0]}'s result")
    return f"head map: {', '.join(pairs[:4])}" + (" ..." if len(pairs) > 4 else "")


def _shifted_rows(e: Evidence) -> str:
    rows = len(e.got)
    for shift in (1, -1):
        if rows < 3:
            return ""
        mine, theirs = (slice(0, rows - 1), slice(1, rows)) if shift > 0 else (slice(1, rows), slice(0, rows - 1))
        same = (e.got[mine] - e.ref[theirs]).abs() <= e.bound[theirs] + 1e-12
        if bool(same.all()) and not bool((e.ref[mine] == e.ref[theirs]).all()):
            return f"shift: row t holds what row t {'+' if shift > 0 else '-'} 1 should"
    return ""


def _by_place(e: Evidence, places: Places) -> Iterator[str]:
    rows = e.along(0)
    at, owner = torch.tensor(places.positions), torch.tensor(places.requests)
    if bool(rows.all()):
        return
    if places.window:
        for first in (places.window, places.window - 1):
            if first > 0 and torch.equal(rows, at >= first):
                cut = f"where a window of {places.window} begins to cut"
                yield f"window: all rows from position {first} on are wrong, {cut}"
    last = torch.tensor([r != s for r, s in zip(places.requests, [*places.requests[1:], -1], strict=True)])
    if torch.equal(rows, last) and len(rows) > int(last.sum()):
        yield "tail: only the last position of each request is wrong"
    if places.block_size:
        yield _by_block(rows, at, places.block_size)
    wrong_requests = set(owner[rows].tolist())
    if len(wrong_requests) == 1 and len(set(places.requests)) > 1:
        name = wrong_requests.pop()
        every = bool(rows[owner == name].all())
        yield f"one request: {'all rows' if every else 'rows'} of request {name} are wrong, and of no other"


def _by_block(rows: Tensor, at: Tensor, size: int) -> str:
    beyond = at >= size
    if bool(beyond.any()) and torch.equal(rows, beyond):
        return f"block boundary: all rows from position {size} on are wrong, where the second block of {size} begins"
    for offset, name in ((0, "first"), (size - 1, "last")):
        there = at % size == offset
        if bool(there.any()) and torch.equal(rows, there & rows) and int(rows.sum()) > 1:
            return f"block boundary: only rows at the {name} position of a block of {size} are wrong"
    first = int(at[rows].min())
    if first >= size and first % size == 0:
        return f"block boundary: nothing is wrong before position {first}, where a block of {size} begins"
    return ""


def _head_subset(e: Evidence) -> str:
    if e.wrong.dim() < 3:
        return ""
    heads = e.along(1)
    by_row = e.wrong.flatten(2).any(-1)
    if bool(heads.all()) or not bool(by_row[:, heads].all()):
        return ""
    names = ", ".join(map(str, torch.where(heads)[0].tolist()))
    return f"head map: heads {names} are wrong in every row, the others are right"


def _tails(e: Evidence) -> str:
    """Only the end of an axis is wrong."""
    last = e.wrong.dim() - 1
    for axis, name in ((last, "columns"), (0, "rows")):
        marks = e.along(axis)
        first = int(marks.int().argmax())
        if len(marks) > 1 and first > 0 and bool(marks[first:].all()):
            return f"tile tail: only {name} from {first} on are wrong, of {len(marks)}"
        if last == 0:
            break
    columns = e.along(last)
    count = int(columns.sum())
    if last and count < len(columns) and bool(columns[:count].all()):
        return f"part: only the first {count} of {len(columns)} columns are wrong"
    return ""


def _order(e: Evidence) -> str:
    """The right values of each row, in another order."""
    if e.got.dim() < 2 or e.got.shape[-1] < 3:
        return ""
    got, ref = e.got.sort(-1).values, e.ref.sort(-1).values
    limit = e.bound.amax(-1, keepdim=True) + 1e-12
    return "order: each row has the right values in other columns" if bool(((got - ref).abs() <= limit).all()) else ""


def _rounding(e: Evidence) -> str:
    ratio = (e.got - e.ref).abs() / e.bound.clamp(min=1e-300)
    worst = float(ratio.max())
    if worst > _SMALL_RATIO:
        return ""
    return (
        f"rounding: no error is above {worst:.2g} bounds; a sum or an intermediate result is kept in too narrow a type"
    )
