"""L1: which experts a token goes to, exactly, and with which weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import RouteArgs, RouteOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.operations.cache_memory import int32
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import DTYPES
from core_conformance.tolerance import U_ACC

_MARGIN = 1e-4
"""Rows whose choice is nearer to another one than this are not asked for."""
_FORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "raw-weights": {"renormalize": False},
    "scaled": {"scaling": 2.5},
    "sigmoid": {"scoring": "sigmoid"},
    "bias": {"scoring": "sigmoid", "features": frozenset({"bias"})},
    "groups": {"num_groups": 4, "top_k_groups": 2},
    "groups-bias": {"num_groups": 4, "top_k_groups": 2, "scoring": "sigmoid", "features": frozenset({"bias"})},
    "one-of-many": {"num_experts": 61, "top_k": 1},
    "all": {"num_experts": 5, "top_k": 5},
}


_Answer = tuple[Tensor, Tensor, Tensor]


def _op(dtype: DType, **changes: Any) -> RouteOp:
    fields: dict[str, Any] = {"num_experts": 16, "top_k": 4}
    return RouteOp(dtype=dtype, **(fields | changes))


def _by_hand(op: RouteOp, logits: Tensor, bias: Tensor | None) -> _Answer:
    """(weights, ids, margin [T]: how far the nearest other choice is), float64, from the words of the definition."""
    rows = []
    for row in logits.double():
        scores = torch.softmax(row, 0) if op.scoring == "softmax" else 1 / (1 + torch.exp(-row))
        choice = scores if bias is None else scores + bias.double()
        size = op.num_experts // op.num_groups
        groups = [choice[g * size : (g + 1) * size] for g in range(op.num_groups)]
        worth = [float(g.sort(descending=True).values[: 2 if bias is not None else 1].sum()) for g in groups]
        stays = sorted(range(op.num_groups), key=lambda g: (-worth[g], g))[: op.top_k_groups]
        open_to = [e for e in range(op.num_experts) if op.num_groups == 1 or e // size in stays]
        order = sorted(open_to, key=lambda e: (-float(choice[e]), e))
        ids = order[: op.top_k]
        weights = scores[ids]
        weights = weights / weights.sum() if op.renormalize else weights
        margin = min(_gap([float(choice[e]) for e in order[: op.top_k + 1]]), _gap(sorted(worth, reverse=True)))
        rows.append((weights * op.scaling, torch.tensor(ids), torch.tensor(margin)))
    all_weights, all_ids, margins = (torch.stack(part) for part in zip(*rows, strict=True))
    return all_weights, all_ids.to(torch.int32), margins


def _gap(falling: list[float]) -> float:
    return min((a - b for a, b in pairwise(falling)), default=1.0)


@check("L1/route", [f"{form}-{dtype}" for form in _FORMS for dtype in DTYPES])
def test_experts_and_weights(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Scores, bias, groups, normalisation; ids exactly, in falling order."""
    form, name = variant.rsplit("-", 1)
    op = _op(DTYPES[name], **_FORMS[form])
    logits = torch.randn(24, op.num_experts, generator=dice) * 2
    bias = torch.randn(op.num_experts, generator=dice) * 0.3 if op.has("bias") else None
    _check(subject, op, logits, bias)


def _check(subject: Subject, op: RouteOp, logits: Tensor, bias: Tensor | None) -> None:
    route, put = subject.bind(op), subject.put
    weights, ids, margins = _by_hand(op, logits, bias)
    clear = margins > _MARGIN
    assert int(clear.sum()) >= len(logits) // 3, "too few rows are clear of another choice: the check shows nothing"
    given = RouteArgs(router_logits=put(logits), bias=None if bias is None else put(bias))
    got_weights, got_ids = (subject.get(x) for x in route(given))
    suspects = _suspects(op, logits[clear], bias)
    subject.equal(op, got_ids[clear], ids[clear], "expert ids", suspects=lambda got: _part(suspects(got), 1))
    exact = weights[clear]
    bound = 64 * U_ACC * exact.abs() + 4 * U_ACC
    subject.agree(op, got_weights[clear], exact, bound, "weights", suspects=lambda got: _part(suspects(got), 0))


def _suspects(op: RouteOp, logits: Tensor, bias: Tensor | None) -> Callable[[Tensor], dict[str, _Answer]]:
    def suspects(got: Tensor) -> dict[str, _Answer]:
        found = {}
        if op.renormalize:
            raw = dataclasses.replace(op, renormalize=False)
            found["weights: they are not divided by their sum"] = _by_hand(raw, logits, bias)
        if op.scaling != 1:
            found["scale: the scaling is left out"] = _by_hand(dataclasses.replace(op, scaling=1.0), logits, bias)
        if bias is not None:
            found["bias: it does not count"] = _by_hand(op, logits, None)
            weights, ids, margin = _by_hand(op, logits, bias)
            mixed = weights / weights.sum(-1, keepdim=True) + bias.double()[ids.long()]
            found["bias: it counts in the weights too"] = (mixed, ids, margin)
        if op.num_groups > 1:
            found["groups: the limit is ignored"] = _by_hand(dataclasses.replace(op, num_groups=1), logits, bias)
        return found

    return suspects


def _part(found: dict[str, _Answer], index: int) -> dict[str, Tensor]:
    return {name: parts[index].double() for name, parts in found.items()}


@check("L1/route/ties", [f"{form}-{dtype}" for form in ("experts", "bias", "groups") for dtype in DTYPES])
def test_ties_go_to_the_lower_id(subject: Subject, variant: str) -> None:
    """All logits equal: the lowest experts, of the lowest groups, in order, each with the same weight."""
    form, name = variant.split("-")
    changes = {"experts": {}, "bias": _FORMS["bias"], "groups": _FORMS["groups"]}[form]
    op, put = _op(DTYPES[name], **changes), subject.put
    bias = torch.zeros(op.num_experts)
    if form == "bias":  # the tie is among the experts that the bias lifts
        bias[[3, 5, 8, 9, 14]] = 1.0
    given = RouteArgs(router_logits=put(torch.zeros(3, op.num_experts)), bias=put(bias) if op.has("bias") else None)
    weights, ids = subject.bind(op)(given)
    expected = [3, 5, 8, 9] if form == "bias" else [0, 1, 2, 3]
    subject.equal(op, ids, int32([expected] * 3), "expert ids")
    subject.agree(op, weights, torch.full((3, 4), 0.25, dtype=torch.float64), 8 * U_ACC, "weights")


@check("L1/route/extremes", DTYPES)
def test_extreme_logits_and_no_token(subject: Subject, variant: DType) -> None:
    """Logits of hundreds do not overflow; a step without tokens gives nothing."""
    op, put = _op(variant), subject.put
    logits = torch.linspace(-400, 400, op.num_experts)[None].repeat(2, 1)
    logits[1] = logits[1].flip(0)
    route = subject.bind(op)
    weights, ids = route(RouteArgs(router_logits=put(logits)))
    # Behind the second the scores are zero in float32.
    subject.equal(op, ids[:, :2], int32([[15, 14], [0, 1]]), "expert ids")
    exact = torch.tensor([[1.0, 0, 0, 0]] * 2, dtype=torch.float64)
    subject.agree(op, weights, exact, 8 * U_ACC, "weights")
    weights, ids = route(RouteArgs(router_logits=put(logits[:0])))
    subject.equal(op, ids, torch.zeros(0, 4, dtype=torch.int32), "expert ids without tokens")
    subject.equal(op, weights, torch.zeros(0, 4), "weights without tokens")
