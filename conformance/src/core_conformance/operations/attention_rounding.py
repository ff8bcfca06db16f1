"""What attention in the format "int16_row" may err: the roundings of the format, and those of a plain kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionOp
from core_conformance.operations.paged import PagedStep
from core_conformance.tolerance import LOG_ROUNDINGS, ROUNDING_SIGMAS, U_ACC, pointwise_bound, unit_roundoff

__all__ = ["ErrorBounds", "error_bounds"]

_REACH, _WEIGHT_REACH = 0.5 / 2047, 0.5 / 8191
"""How far rounding moves an element, of its row's largest magnitude, and a weight, of its chunk's largest."""
_CHUNK = 128
_LEAST = 2.0**-90
"""Probabilities below this may be anything below it: exponentials of float32 end near there."""
_SURE = ROUNDING_SIGMAS / math.sqrt(3.0)
"""Of roundings that reach r each and are independent, what their sum of squares is multiplied with."""
_FEW = 8.0
"""A weight of fewer reaches is not spread evenly between two integers: many of them err to the same side."""


@dataclass(frozen=True, kw_only=True)
class ErrorBounds:
    """Bounds of a step, element by element.

    Args:
        values: [tokens, num_heads, v_head_dim].
        lse: [tokens, num_heads].
    """

    values: Tensor
    lse: Tensor


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """One head of one request in float64.

    Args:
        op: The attention.
        query: [n, head_dim].
        key: [m, head_dim].
        value: [m, v_head_dim].
        probs: [n, m], 0 where a key is not seen.
        slopes: [n, m], derivative of the logits by the scaled products.
        mixed: [n, v_head_dim], the exact result.
        lse: [n].
    """

    op: AttentionOp
    query: Tensor
    key: Tensor
    value: Tensor
    probs: Tensor
    slopes: Tensor
    mixed: Tensor
    lse: Tensor


def error_bounds(step: PagedStep, sinks: Tensor | None = None, *, rounds: bool) -> ErrorBounds:
    """Bounds of what the device answers.

    Args:
        step: Causal, without padding.
        sinks: [num_heads].
        rounds: Whether the kernel may round to "int16_row"; it may also leave rows as they are.
    """
    op, start = step.op, 0
    assert op.causal and step.scales is None and not step.padding
    found: list[list[Tensor]] = []
    for count, keys, values in zip(step.query_lens, step.keys, step.values, strict=True):
        query = step.query[start : start + count].double()
        start += count
        heads = []
        for head in range(op.num_heads):
            of = head // (op.num_heads // op.num_kv_heads)
            sink = None if sinks is None else sinks[head].double()
            rows = _rows(op, query[:, head], keys[:, of].double(), values[:, of].double(), sink)
            errors = [_plain_errors(rows)] + ([_rounding_errors(rows)] if rounds else [])
            heads.append([sum(parts[1:], parts[0]) for parts in zip(*errors, strict=True)])
        found.append([torch.stack(parts, dim=1) for parts in zip(*heads, strict=True)])
    together, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
    return ErrorBounds(values=together, lse=lse)


def _rows(op: AttentionOp, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> _Rows:
    logits, slopes = query @ key.T * op.scale, torch.ones(len(query), len(key), dtype=torch.float64)
    if op.softcap:
        bent = torch.tanh(logits / op.softcap)
        logits, slopes = op.softcap * bent, 1 - bent.square()
    at, position = torch.arange(len(key)), torch.arange(len(key) - len(query), len(key))[:, None]
    seen = (at <= position) & (at > position - (op.window or len(key)))
    logits = logits.masked_fill(~seen, -math.inf)
    lse = logits.logsumexp(-1) if sink is None else torch.logaddexp(logits.logsumexp(-1), sink)
    probs = torch.exp(logits - lse[:, None])
    mixed = probs @ value
    return _Rows(op=op, query=query, key=key, value=value, probs=probs, slopes=slopes, mixed=mixed, lse=lse)


def _plain_errors(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Logits and sums in float32; the result in the model's type, and probabilities too, since kernels may do that."""
    op, unit = rows.op, unit_roundoff(torch_dtype(rows.op.dtype))
    value, mixed = rows.value.abs(), rows.mixed.abs()
    products = abs(op.scale) * rows.query.abs() @ rows.key.abs().T
    logits = rows.probs * rows.slopes * products * (4 * math.sqrt(op.head_dim) * U_ACC)
    least = _LEAST * rows.value.abs().amax()
    sums = rows.probs * ((LOG_ROUNDINGS + 4 * math.sqrt(len(value))) * U_ACC)
    halves = _sum_of_independent(unit * rows.probs, value) + _SURE * unit * rows.probs.norm(dim=-1)[:, None] * mixed
    in_float32 = (logits + sums) @ value + (logits + sums).sum(-1)[:, None] * mixed
    lse = pointwise_bound(rows.lse, rows.lse.abs() + 8.0, torch.float32, LOG_ROUNDINGS)
    return (1 + 2.0**-10) * unit * mixed + halves + in_float32 + least, lse + logits.sum(-1)


def _rounding_errors(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Of queries and keys through the logits, of values, and of probabilities."""
    scale, value = abs(rows.op.scale), rows.value
    query_reach = _REACH * rows.query.abs().amax(-1, keepdim=True)
    key_reach = _REACH * rows.key.abs().amax(-1)
    weights = rows.probs * rows.slopes
    query_size, key_size = rows.query.norm(dim=-1, keepdim=True), rows.key.norm(dim=-1)
    # How the results move with each element of the query: d lse / d q and d mixed / d q, both before scaling.
    lse_by_query = weights @ rows.key
    mixed_by_query = (weights[:, :, None] * rows.key).transpose(1, 2) @ value
    mixed_by_query -= lse_by_query[:, :, None] * rows.mixed[:, None, :]
    spread = (weights * key_reach).square()
    apart = spread @ value.square() - 2 * rows.mixed * (spread @ value)
    apart += rows.mixed.square() * spread.sum(-1, keepdim=True)
    mixed = query_reach * mixed_by_query.norm(dim=1) + query_size * apart.clamp(min=0).sqrt()
    lse = query_reach.squeeze(1) * lse_by_query.norm(dim=1) + query_size.squeeze(1) * spread.sum(-1).sqrt()
    # Beyond first order: exponentials grow with the logits, and a cap's slope changes along them.
    moved = _SURE * scale * (query_reach * key_size + query_size * key_reach) * (rows.probs > 0)
    most = moved.amax(-1, keepdim=True)
    bent = 0.4 / rows.op.softcap * most.square() if rows.op.softcap else torch.zeros_like(most)
    through_logits = _SURE * scale * mixed * torch.exp(2 * most)
    through_logits += bent * (rows.probs @ value.abs() + rows.mixed.abs())
    value_reach = _REACH * value.abs().amax(-1, keepdim=True) * (value != 0)
    of_values = _sum_of_independent(rows.probs, value_reach)
    lse = _SURE * scale * lse * torch.exp(2 * most[:, 0]) + bent[:, 0]
    return through_logits + of_values + _weight_errors(rows), lse


def _weight_errors(rows: _Rows) -> Tensor:
    """Of probabilities times their values' scales, wherever chunks begin."""
    largest = rows.value.abs().amax(-1)
    weights = rows.probs * largest
    around = torch.nn.functional.max_pool1d(weights[:, None], 2 * _CHUNK - 1, stride=1, padding=_CHUNK - 1)[:, 0]
    reach = torch.where(weights > 0, _WEIGHT_REACH * around, 0.0)
    parts = rows.value.abs() / largest.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
    few = weights < _FEW * reach
    biased = torch.where(few, torch.minimum(weights, reach), 0.0) @ parts
    return biased + _sum_of_independent(torch.where(few, 0.0, reach), parts)


def _sum_of_independent(left: Tensor, right: Tensor) -> Tensor:
    """Bound of sums of errors that reach left[n, j] * right[j, d] each, one for each j."""
    return torch.minimum(left @ right.abs(), _SURE * (left.square() @ right.square()).sqrt())
