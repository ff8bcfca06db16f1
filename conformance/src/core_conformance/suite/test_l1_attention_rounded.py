"""L1: attention where queries, keys, probabilities and values may be rounded, as far as the Verdict declares it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import AttentionOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.operations.attention_by_hand import attention_bound, attention_suspects
from core_conformance.operations.attention_rounding import error_bounds
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Mismatch, Subject, wide_op
from core_conformance.suite.test_l1_attention import attention_op

_SPREAD = (10.0, 0.1, 1.0)
"""Sizes of rows that follow each other."""


def _as_drawn(step: PagedStep) -> None:
    """Normal numbers."""


def _own_key_first(step: PagedStep) -> None:
    """A query is the key of its position, so that its logit is the largest and every error of an element adds to it."""
    start, group = 0, step.op.num_heads // step.op.num_kv_heads
    for row, count in enumerate(step.query_lens):
        step.keys[row] = _uniform(step, *step.keys[row].shape)
        own = step.keys[row][len(step.keys[row]) - count :]
        step.query[start : start + count] = own.repeat_interleave(group, dim=1)
        start += count


def _rows_of_different_sizes(step: PagedStep) -> None:
    """Queries, keys and values a hundred times as large as their neighbours."""
    for row in range(len(step.keys)):
        step.keys[row] *= _sizes(len(step.keys[row]), 1)
        step.values[row] *= _sizes(len(step.values[row]), 2)
    step.query *= _sizes(len(step.query), 4)


def _many_small_beside_a_large(step: PagedStep) -> None:
    """The first key has nearly all of the weight and a value of one element; others are positive and count together."""
    direction = torch.rand(step.op.head_dim, generator=step.draw) + 0.5
    peak = step.op.scale * float(direction.square().sum())  # the logit of query and key along the direction
    step.query[:] = direction + 0.01 * torch.randn(step.query.shape, generator=step.draw)
    for row in range(len(step.keys)):
        length = len(step.keys[row])
        below = torch.full((length, 1, 1), math.log(20000.0))
        below[:128] = math.log(1000.0)
        below[0] = 0.0
        noise = torch.randn(step.keys[row].shape, generator=step.draw) * 0.15
        step.keys[row][:] = direction * (2.0 - below / peak) + noise * (below > 0)
        step.values[row][:] = torch.rand(step.values[row].shape, generator=step.draw) * 0.5 + 0.5
        step.values[row][0] = 0.0
        step.values[row][0, :, 0] = 1.0


def _sizes(count: int, run: int) -> Tensor:
    """[count, 1, 1], bfloat16: each size for `run` rows."""
    return torch.tensor(_SPREAD)[torch.arange(count) // run % len(_SPREAD)].view(-1, 1, 1).bfloat16()


def _uniform(step: PagedStep, *shape: int) -> Tensor:
    """Of variance 1: few of the largest elements are far from the typical one, so that roundings are fine."""
    return ((torch.rand(*shape, generator=step.draw) * 2 - 1) * math.sqrt(3.0)).bfloat16()


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A step.

    Args:
        lens: (query_len, seq_len) of its requests.
        changes: Of the operation, against grouped heads of 64.
        fill: What queries, keys and values are.
    """

    lens: tuple[tuple[int, int], ...]
    changes: dict[str, Any] = field(default_factory=dict)
    fill: Callable[[PagedStep], None] = _as_drawn


_CASES = {
    "prompt-bf16": _Case(lens=((5, 5), (40, 300), (70, 70))),
    "decode-bf16": _Case(lens=((1, 1), (1, 17), (1, 130), (1, 300))),
    "window-bf16": _Case(lens=((40, 200), (60, 60)), changes={"window": 1}, fill=_rows_of_different_sizes),
    "softcap-bf16": _Case(lens=((30, 30), (50, 180)), changes={"softcap": 2.0, "scale": 0.25}),
    "tail-bf16": _Case(lens=((30, 170), (40, 500)), fill=_many_small_beside_a_large),
    "lse-bf16": _Case(
        lens=((40, 40), (60, 140)),
        changes={"features": frozenset({"lse"}), "head_dim": 128, "v_head_dim": 128, "scale": 128**-0.5},
        fill=_own_key_first,
    ),
    "lse-sinks-bf16": _Case(
        lens=((40, 200), (60, 60)),
        changes={"features": frozenset({"lse", "sinks"}), "window": 1},
        fill=_rows_of_different_sizes,
    ),
}


@check("L1/attention/rounded", _CASES)
def test_rounded_attention_is_as_exact_as_the_verdict_declares(
    subject: Subject, dice: torch.Generator, variant: _Case
) -> None:
    """Where rounding is allowed: plain bounds without a declaration, else those of the format that is declared."""
    plain = attention_op(DType.BFLOAT16, **variant.changes)
    op = dataclasses.replace(plain, quantize_activations=True)
    unasked = subject.backend.supports(plain, subject.target.device).activation_format
    if unasked is not None:
        raise Mismatch(f"{plain.describe()}: activations are rounded to {unasked}, which nobody allowed")
    form = subject.backend.supports(op, subject.target.device).activation_format
    subject.bind(op)
    if form not in (None, "int16_row"):
        raise Mismatch(f"{op.describe()}: attention has no format {form!r}; declare int16_row, or None")
    query_lens, seq_lens = zip(*variant.lens, strict=True)
    step = PagedStep(subject, op, query_lens, seq_lens)
    variant.fill(step)
    sinks = torch.randn(op.num_heads, generator=dice) if op.has("sinks") else None
    lse = subject.put(torch.full((step.num_tokens, op.num_heads), float("nan"))) if op.has("lse") else None
    out = step.run(lse=lse, sinks=None if sinks is None else subject.put(sinks))
    _compare(subject, step, out, sinks, lse, rounds=form is not None and subject.is_native(op))


def _compare(
    subject: Subject, step: PagedStep, out: Tensor, sinks: Tensor | None, lse: Tensor | None, *, rounds: bool
) -> None:
    op: AttentionOp = step.op
    exact_lse = torch.zeros(step.num_tokens, op.num_heads, dtype=torch.float64)
    exact = step.exact(wide_op(op), sinks=sinks, lse=None if lse is None else exact_lse)
    bounds = error_bounds(step, sinks, rounds=rounds)
    limit = bounds.values if rounds else torch.minimum(bounds.values, attention_bound(step, exact, sinks))
    if lse is not None:
        subject.agree(op, lse, exact_lse, bounds.lse, "lse", places=step.places)
    subject.agree(op, out, exact, limit, places=step.places, suspects=attention_suspects(step, sinks))
