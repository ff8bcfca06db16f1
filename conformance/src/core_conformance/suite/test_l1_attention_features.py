"""L1: attention with what not every model has: caps, sinks, log-sum-exp, ragged mode, 8-bit caches, all together."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, MergeLseArgs, MergeLseOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.operations.attention_by_hand import attention_bound, attention_suspects
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Subject, oracle, wide_op
from core_conformance.suite.test_l1_attention import attention_op, check_attention, lens_of
from core_conformance.suite.test_l1_dense import DTYPES
from core_conformance.tolerance import LOG_ROUNDINGS, pointwise_bound

KV8 = {"e4m3": DType.FLOAT8_E4M3FN, "e5m2": DType.FLOAT8_E5M2, "int8": DType.INT8}
"""8-bit caches."""
_TOGETHER: dict[str, dict[str, Any]] = {
    "softcap-window": {"softcap": 2.0, "scale": 0.5, "window": 5},
    "sinks-window": {"features": {"sinks"}, "window": 5},
    "sinks-lse": {"features": {"sinks", "lse"}},
    "lse-window": {"features": {"lse"}, "window": 5},
    "lse-softcap": {"features": {"lse"}, "softcap": 2.0, "scale": 0.5},
    "lse-bidirectional": {"features": {"lse"}, "causal": False},
}
"""What models combine: Gemma caps and slides, gpt-oss has sinks and slides, cascades need the log-sum-exp of each."""
_RAGGED: dict[str, dict[str, Any]] = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0, "scale": 0.5},
    "lse": {"features": {"lse"}},
    "sinks": {"features": {"sinks"}},
}


@check("L1/attention/softcap", DTYPES)
def test_softcap(subject: Subject, variant: DType) -> None:
    """Logits bent by tanh; the scale is large, so that the cap bites."""
    op = attention_op(variant, softcap=2.0, scale=0.5)
    check_attention(subject, op, *lens_of(subject.block_size, "mixed"))


@check("L1/attention/bidirectional", DTYPES)
def test_not_causal(subject: Subject, variant: DType) -> None:
    """Every query sees every key of its request."""
    check_attention(subject, attention_op(variant, causal=False), *lens_of(subject.block_size, "mixed"))


@check("L1/attention/sinks", DTYPES)
def test_sinks_join_the_denominator(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """A logit for each head without a value."""
    op = attention_op(variant, features=frozenset({"sinks"}))
    _check_step(subject, dice, PagedStep(subject, op, *lens_of(subject.block_size, "mixed")))


@check("L1/attention/lse", DTYPES)
def test_log_sum_exp(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """The natural logarithm of the denominator, float32, beside an unchanged result."""
    op = attention_op(variant, features=frozenset({"lse"}))
    _check_step(subject, dice, PagedStep(subject, op, *lens_of(subject.block_size, "mixed")))


@check("L1/attention/together", [f"{form}-{dtype}" for form in _TOGETHER for dtype in DTYPES])
def test_several_features_at_once(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """What models ask for together."""
    form, dtype = variant.rsplit("-", 1)
    op = _with(attention_op(DTYPES[dtype]), _TOGETHER[form])
    _check_step(subject, dice, PagedStep(subject, op, *lens_of(subject.block_size, "mixed")))


@check("L1/attention/kv8", [f"{kv}-{scales}-{dtype}" for kv in KV8 for scales in ("one", "heads") for dtype in DTYPES])
def test_caches_of_eight_bits(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Keys are the stored ones times their scale, one for all heads or one a head."""
    kv, form, dtype = variant.split("-")
    op = attention_op(DTYPES[dtype], kv_dtype=KV8[kv], features=frozenset({"scales"}))
    down = 2.0**-6 if kv == "int8" else 1.0
    scales = {"one": ([0.5], [2.0]), "heads": ([0.5, 1.0], [2.0, 0.25])}[form]
    tensors = tuple(torch.tensor(values) * down for values in scales)
    size = subject.block_size
    step = PagedStep(subject, op, [1, 1, 3], [size + 1, 7, size + 3], scales=(tensors[0], tensors[1]))
    _check_step(subject, dice, step)


@check("L1/attention/kv8-plain", [f"{kv}-{dtype}" for kv in ("e4m3", "e5m2") for dtype in DTYPES])
def test_caches_of_eight_bits_without_scales(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Scales that are not given are 1."""
    kv, dtype = variant.split("-")
    op, size = attention_op(DTYPES[dtype], kv_dtype=KV8[kv]), subject.block_size
    _check_step(subject, dice, PagedStep(subject, op, [1, 3], [size + 1, size + 3]))


@check("L1/attention/ragged", [f"{form}-{dtype}" for form in _RAGGED for dtype in DTYPES])
def test_ragged_mode(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Without a cache the keys are the step's own."""
    form, dtype = variant.rsplit("-", 1)
    cached = _with(attention_op(DTYPES[dtype]), _RAGGED[form])
    op = dataclasses.replace(cached, features=cached.features | {"ragged"})
    attend = subject.bind(op)
    lens = [1, 5, 17]
    step = PagedStep(subject, cached, lens, lens)
    fields, sinks, lse = _extras(subject, dice, cached, step.num_tokens)
    key, value = (subject.put(torch.cat(x)) for x in (step.keys, step.values))
    out = attend(AttentionArgs(query=step.device_query(), cache=None, plan=step.plan(), key=key, value=value, **fields))
    _compare(subject, step, out, sinks, lse)


def _with(op: AttentionOp, changes: dict[str, Any]) -> AttentionOp:
    return dataclasses.replace(op, **(changes | {"features": frozenset(changes.get("features", ()))}))


def _extras(
    subject: Subject, dice: torch.Generator, op: AttentionOp, tokens: int
) -> tuple[dict[str, Any], Tensor | None, Tensor | None]:
    """Fields of the record, sinks on the host, and the tensor for the log-sum-exp on the device, NaN so far."""
    sinks = torch.randn(op.num_heads, generator=dice) if op.has("sinks") else None
    lse = subject.put(torch.full((tokens, op.num_heads), float("nan"))) if op.has("lse") else None
    return {"sinks": None if sinks is None else subject.put(sinks), "lse": lse}, sinks, lse


def _check_step(subject: Subject, dice: torch.Generator, step: PagedStep) -> None:
    subject.bind(step.op)
    fields, sinks, lse = _extras(subject, dice, step.op, step.num_tokens)
    _compare(subject, step, step.run(**fields), sinks, lse)


def _compare(subject: Subject, step: PagedStep, out: Tensor, sinks: Tensor | None, lse: Tensor | None) -> None:
    op = step.op
    exact_lse = None if lse is None else torch.zeros(lse.shape, dtype=torch.float64)
    exact = step.exact(wide_op(op), sinks=sinks, lse=exact_lse)
    bound, suspects = attention_bound(step, exact, sinks), attention_suspects(step, sinks)
    subject.agree(op, out, exact, bound, places=step.places, suspects=suspects)
    if lse is not None and exact_lse is not None:
        limit = pointwise_bound(exact_lse, exact_lse.abs() + 8.0, torch.float32, LOG_ROUNDINGS)
        subject.agree(op, lse, exact_lse, limit, "lse", places=step.places)


@check("L1/merge_lse", DTYPES)
def test_merge_lse(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Parts of very different weight; a part without keys, which may hold NaN; a token without any key."""
    op = MergeLseOp(dtype=variant, num_heads=3, v_head_dim=32)
    outs = torch.randn(4, 5, 3, 32, generator=dice).to(torch_dtype(variant))
    lses = torch.randn(4, 5, 3, generator=dice) * 8
    lses[1], lses[:, 2] = float("-inf"), float("-inf")
    merge = subject.bind(op)
    clean = outs.clone()
    clean[1] = 0
    outs[1], outs[:, 2] = float("nan"), float("nan")
    clean[:, 2] = 0
    out, lse = merge(MergeLseArgs(outs=subject.put(outs), lses=subject.put(lses)))
    exact, exact_lse = oracle(wide_op(op))(MergeLseArgs(outs=clean.double(), lses=lses.double()))
    weights = torch.softmax(lses.double(), 0).nan_to_num()[..., None]
    magnitude = (weights * clean.double().abs()).sum(0)
    subject.agree(op, out, exact, pointwise_bound(exact, 3 * magnitude, outs.dtype))
    size = torch.where(exact_lse.isfinite(), exact_lse.abs() + 1, torch.tensor(1.0, dtype=torch.float64))
    subject.agree(op, lse, exact_lse, pointwise_bound(size, size, torch.float32), "lse")


@check("L1/merge_lse/halves", DTYPES)
def test_merging_two_halves_is_attention_over_all_keys(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Two equal parts give their mean, and ln 2 more; parts in float32 are taken as they are."""
    op = MergeLseOp(dtype=variant, num_heads=2, v_head_dim=16)
    outs = torch.randint(-8, 9, (2, 3, 2, 16), generator=dice).float()
    lses = torch.full((2, 3, 2), 1.25)
    out, lse = subject.bind(op)(MergeLseArgs(outs=subject.put(outs), lses=subject.put(lses)))
    exact = outs.double().mean(0)
    subject.agree(op, out, exact, pointwise_bound(exact, outs.abs().double().amax(0), torch_dtype(variant), 4))
    total = torch.full((3, 2), 1.25, dtype=torch.float64) + torch.log(torch.tensor(2.0, dtype=torch.float64))
    subject.agree(op, lse, total, 4 * 2.0**-23, "lse")
