"""Attention as one writes it down, without the reference: the measure of honest errors, and what known bugs answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.backend import torch_dtype
from core_conformance.diagnosis import Suspects
from core_conformance.operations.paged import PagedStep
from core_conformance.tolerance import COMPOSITE_RATIO, attention_floor

__all__ = ["ByHand", "attention_bound", "attention_suspects", "by_hand"]

_FIT_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class ByHand:
    """What may differ from the operation.

    Args:
        rounded: Logits and softmax in float32, probabilities and results in the model's type; float64 otherwise.
        more_keys: Keys that a query sees beyond its own position; negative for fewer.
        more_window: Keys that the window is too wide.
        causal: Whether later keys are hidden; None as the operation says.
        modulo_heads: Query head h reads key head h % num_kv_heads.
        factor: On the scale of logits.
        scaled: Whether stored keys and values are multiplied by the cache's scales.
    """

    rounded: bool = False
    more_keys: int = 0
    more_window: int = 0
    causal: bool | None = None
    modulo_heads: bool = False
    factor: float = 1.0
    scaled: bool = True


def by_hand(step: PagedStep, how: ByHand, sinks: Tensor | None = None) -> Tensor:
    """[real tokens, num_heads, v_head_dim], float64, or the model's type where `rounded`."""
    op, start, rows = step.op, 0, []
    wide = torch.float32 if how.rounded else torch.float64
    for count, length, keys, values in zip(step.query_lens, step.seq_lens, step.keys, step.values, strict=True):
        query = step.query[start : start + count].to(wide).transpose(0, 1)
        start += count
        key, value = (_per_head(step, x.to(wide), plane, how) for plane, x in enumerate((keys, values)))
        logits = query @ key.transpose(1, 2) * (op.scale * how.factor)
        if op.softcap:
            logits = op.softcap * torch.tanh(logits / op.softcap)
        logits = logits.masked_fill(~_seen(step, count, length, how), float("-inf"))
        if sinks is not None:
            extra = sinks.to(wide)[:, None, None].expand(-1, count, 1)
            logits = torch.cat((logits, extra), dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :length].nan_to_num()
        if how.rounded:
            weights = weights.to(torch_dtype(op.dtype)).float()
        rows.append((weights @ value).transpose(0, 1))
    out = torch.cat(rows) if rows else step.query.new_zeros(0, op.num_heads, op.v_head_dim, dtype=wide)
    return out.to(torch_dtype(op.dtype)) if how.rounded else out


def _per_head(step: PagedStep, x: Tensor, plane: int, how: ByHand) -> Tensor:
    """[num_heads, length, dim], scaled."""
    op = step.op
    if step.scales is not None and how.scaled:
        x = x * step.scales[plane].to(x.dtype).view(-1, 1)
    heads = torch.arange(op.num_heads)
    owner = heads % op.num_kv_heads if how.modulo_heads else heads // (op.num_heads // op.num_kv_heads)
    return x.transpose(0, 1)[owner]


def _seen(step: PagedStep, count: int, length: int, how: ByHand) -> Tensor:
    """[count, length], bool."""
    op = step.op
    at, position = torch.arange(length), torch.arange(length - count, length)[:, None]
    seen = (at >= 0).expand(count, -1)
    if op.causal if how.causal is None else how.causal:
        seen = seen & (at <= (position + how.more_keys).clamp(min=0))
        if op.window:
            seen = seen & (at > position - op.window - how.more_window)
    return seen


def attention_bound(step: PagedStep, exact: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Twice the plain implementation's largest error, and what rounding of float32 logits alone may do."""
    op = step.op
    scale = torch.ones(1) if step.scales is None else step.scales[0].max()
    largest_key = max((float(key.float().abs().max() * scale) for key in step.keys), default=1.0)
    logits = abs(op.scale) * float(step.query[step.real].float().abs().sum(-1).max()) * largest_key
    scale = torch.ones(1) if step.scales is None else step.scales[1].max()
    values = max(float(value.float().abs().max() * scale) for value in step.values)
    plain = by_hand(step, ByHand(rounded=True), sinks)
    measured = float((plain.double() - exact).abs().max()) if len(exact) else 0.0
    return torch.full_like(exact, COMPOSITE_RATIO * measured + attention_floor(logits, values, op.head_dim))


def attention_suspects(step: PagedStep, sinks: Tensor | None = None) -> Suspects:
    """What the usual bugs of attention answer."""

    def suspects(got: Tensor) -> dict[str, Tensor]:
        found = {name: by_hand(step, how, sinks) for name, how in _usual(step)}
        factor = _fitted(step, got, sinks)
        found[f"scale: logits are multiplied by {factor:.4g} more than they should be"] = by_hand(
            step, ByHand(factor=factor), sinks
        )
        if sinks is not None:
            found["sinks: they are left out of the denominator"] = by_hand(step, ByHand())
        return found

    return suspects


def _usual(step: PagedStep) -> Iterator[tuple[str, ByHand]]:
    if step.op.causal:
        yield "tail: the newest key of each query is left out", ByHand(more_keys=-1)
        yield "mask: each query reads one key past its position", ByHand(more_keys=1)
        yield "mask: queries read later keys of their request", ByHand(causal=False)
    if step.op.window:
        yield "window: off by one, a key too many at its old end", ByHand(more_window=1)
        yield "window: off by one, a key too few at its old end", ByHand(more_window=-1)
    if step.scales is not None:
        yield "scale: the scales of the cache are left out", ByHand(scaled=False)
    if 1 < step.op.num_kv_heads < step.op.num_heads:
        yield "head map: query head h reads key head h % num_kv_heads", ByHand(modulo_heads=True)


def _fitted(step: PagedStep, got: Tensor, sinks: Tensor | None) -> float:
    """The factor on the logits that explains most, by Gauss-Newton."""
    factor = 1.0
    if got.shape[0] != step.real.stop or not got.isfinite().all():
        return factor
    for _ in range(_FIT_STEPS):
        here = by_hand(step, dataclasses.replace(ByHand(), factor=factor), sinks)
        slope = (by_hand(step, ByHand(factor=factor + 1e-4), sinks) - here) / 1e-4
        size = float(slope.square().sum())
        if size == 0:
            break
        factor += max(-0.5, min(0.5, float(((got - here) * slope).sum()) / size))
    return factor
