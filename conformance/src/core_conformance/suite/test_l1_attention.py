"""L1: attention against float64: shapes, dtypes, windows, mixed batches; poison wherever a request owns nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionArgs, AttentionOp, MergeLseArgs, MergeLseOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.paged import POISONS, PagedStep
from core_conformance.records import UnsupportedOutcome
from core_conformance.subject import Mismatch, Subject, oracle, wide_op
from core_conformance.suite.test_l1_dense import DTYPES
from core_conformance.tolerance import COMPOSITE_RATIO, attention_floor, pointwise_bound

_FORMS: dict[str, dict[str, Any]] = {
    "mha": {"num_heads": 2, "num_kv_heads": 2},
    "gqa": {"num_heads": 6, "num_kv_heads": 2},
    "mqa": {"num_heads": 4, "num_kv_heads": 1},
}


def attention_op(dtype: DType, **changes: Any) -> AttentionOp:
    """Grouped heads of 64."""
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "scale": 0.125}
    return AttentionOp(dtype=dtype, kv_dtype=dtype, **(fields | changes))


def _lens(subject: Subject, name: str) -> tuple[list[int], list[int]]:
    """(query_lens, seq_lens) of a batch around the block boundary."""
    size = subject.block_size
    return {
        "decode": ([1] * 5, [1, size - 1, size, size + 1, 2 * size + 3]),
        "prefill": ([1, 5, size - 1, size, size + 1], [1, 5, size - 1, size, size + 1]),
        "chunk": ([3, 7, 9], [size, size + 7, 2 * size + 1]),
        "mixed": ([0, 1, 1, 4, size + 2], [7, size, 3, size + 4, size + 2]),
    }[name]


def check_attention(subject: Subject, op: AttentionOp, query: list[int], seq: list[int], **options: Any) -> None:
    """The device against float64, with the error of a plain implementation in the same types as measure."""
    subject.bind(op)
    step = PagedStep(subject, op, query, seq, **options)
    exact = step.exact(wide_op(op))[step.real]
    bound = _bound(step, exact, _plain(step))
    for poison in POISONS:
        step.poison = poison
        out = step.run()
        subject.agree(op, out[step.real], exact, bound, f"(memory {poison}) result")
        if not subject.get(out).isfinite().all():
            raise Mismatch(f"{op.describe()}: rows of padding must be finite, over memory {poison} they are not")


def _plain(step: PagedStep) -> Tensor:
    """Attention as one writes it down: float32 logits and softmax, probabilities in the model's type, float32 sums."""
    op, dtype = step.op, torch_dtype(step.op.dtype)
    rows = []
    start = 0
    for count, length, keys, values in zip(step.query_lens, step.seq_lens, step.keys, step.values, strict=True):
        query = step.query[start : start + count].float()
        start += count
        repeat = op.num_heads // op.num_kv_heads
        key, value = (x.float().repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (keys, values))
        logits = query.transpose(0, 1) @ key.transpose(1, 2) * op.scale
        if op.softcap:
            logits = op.softcap * torch.tanh(logits / op.softcap)
        at, position = torch.arange(length), torch.arange(length - count, length)[:, None]
        seen = (at <= position) & (at > position - (op.window or length + 1)) if op.causal else at >= 0
        weights = torch.softmax(logits.masked_fill(~seen, float("-inf")), dim=-1)
        rows.append((weights.to(dtype).float() @ value).transpose(0, 1).to(dtype))
    return torch.cat(rows)


def _bound(step: PagedStep, exact: Tensor, plain: Tensor) -> Tensor:
    """Twice the plain implementation's largest error, and what rounding of float32 logits alone may do."""
    op = step.op
    largest_key = max((float(key.float().abs().max()) for key in step.keys), default=1.0)
    logits = abs(op.scale) * float(step.query[step.real].float().abs().sum(-1).max()) * largest_key
    values = max(float(value.float().abs().max()) for value in step.values)
    measured = float((plain.double() - exact).abs().max()) if len(exact) else 0.0
    return torch.full_like(exact, COMPOSITE_RATIO * measured + attention_floor(logits, values, op.head_dim))


@check(
    "L1/attention",
    [f"{batch}-{form}-{d}" for batch in ("decode", "prefill", "chunk", "mixed") for form in _FORMS for d in DTYPES],
)
def test_shapes_around_the_block_boundary(subject: Subject, variant: str) -> None:
    """Decodes, whole prompts, chunks after a past, and all of it in one batch with a request without tokens."""
    batch, form, dtype = variant.split("-")
    check_attention(subject, attention_op(DTYPES[dtype], **_FORMS[form]), *_lens(subject, batch))


@check("L1/attention/window", [f"{window}-{dtype}" for window in ("one", "odd", "block", "wide") for dtype in DTYPES])
def test_sliding_windows(subject: Subject, variant: str) -> None:
    """Windows of one token, an odd number, exactly a block, and longer than any request; older blocks are null."""
    name, dtype = variant.split("-")
    size = subject.block_size
    window = {"one": 1, "odd": size // 2 + 1, "block": size, "wide": 10 * size}[name]
    op = attention_op(DTYPES[dtype], window=window)
    check_attention(subject, op, [1, 1, 1, 4, size + 2], [3, size, 2 * size + 1, 2 * size + 4, size + 2])


@check("L1/attention/permuted", DTYPES)
def test_block_tables_in_any_order(subject: Subject, variant: DType) -> None:
    """The same requests over three other orders of blocks give the same bits."""
    op, size = attention_op(variant), subject.block_size
    outs = []
    for seed in (11, 12, 13):
        step = PagedStep(subject, op, [1, 5], [3 * size - 1, 2 * size + 5], seed=5)
        step.deal_blocks(seed)
        outs.append(subject.get(step.run()))
    for other in outs[1:]:
        subject.equal(op, other, outs[0], "over other blocks, result")


@check("L1/attention/padding", DTYPES)
def test_padding_requests_are_finite_and_harmless(subject: Subject, variant: DType) -> None:
    """Rows as a replayed graph has them: NaN queries, null block, slot -1. Finite themselves, and unseen by others."""
    op, size = attention_op(variant), subject.block_size
    check_attention(subject, op, [1, 1], [size + 1, 3], padding=3)


@check("L1/attention/head-dim", [f"{dim}-{dtype}" for dim in (32, 80, 128, 256) for dtype in DTYPES])
def test_head_sizes(subject: Subject, variant: str) -> None:
    """Head sizes of real models."""
    dim, dtype = variant.split("-")
    op = attention_op(DTYPES[dtype], head_dim=int(dim), v_head_dim=int(dim), scale=int(dim) ** -0.5)
    check_attention(subject, op, [1, 3], [subject.block_size + 1, 7])


@check("L1/attention/softcap", DTYPES)
def test_softcap(subject: Subject, variant: DType) -> None:
    """Logits bent by tanh; the scale is large, so that the cap bites."""
    op = attention_op(variant, softcap=2.0, scale=0.5)
    check_attention(subject, op, *_lens(subject, "mixed"))


@check("L1/attention/bidirectional", DTYPES)
def test_not_causal(subject: Subject, variant: DType) -> None:
    """Every query sees every key of its request."""
    check_attention(subject, attention_op(variant, causal=False), *_lens(subject, "mixed"))


@check("L1/attention/sinks", DTYPES)
def test_sinks_join_the_denominator(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """A logit for each head without a value."""
    op = attention_op(variant, features=frozenset({"sinks"}))
    step = PagedStep(subject, op, *_lens(subject, "mixed"))
    sinks = torch.randn(op.num_heads, generator=dice)
    out = step.run(sinks=subject.put(sinks))
    exact = step.exact(wide_op(op), sinks=sinks)
    subject.agree(op, out, exact, _bound(step, exact, _plain(step)))


@check("L1/attention/lse", DTYPES)
def test_log_sum_exp(subject: Subject, variant: DType) -> None:
    """The natural logarithm of the denominator, float32, beside an unchanged result."""
    op = attention_op(variant, features=frozenset({"lse"}))
    step = PagedStep(subject, op, *_lens(subject, "mixed"))
    lse = subject.put(torch.full((step.num_tokens, op.num_heads), float("nan")))
    out = step.run(lse=lse)
    exact_lse = torch.zeros(step.num_tokens, op.num_heads, dtype=torch.float64)
    exact = step.exact(wide_op(op), lse=exact_lse)
    subject.agree(op, out, exact, _bound(step, exact, _plain(step)))
    subject.agree(op, lse, exact_lse, pointwise_bound(exact_lse, exact_lse.abs() + 8.0, torch.float32, 64), "lse")


@check("L1/attention/every-block-size", DTYPES)
def test_every_block_size_that_the_device_takes(subject: Subject, variant: DType) -> None:
    """A mixed batch at each of `capabilities.block_sizes`."""
    op = attention_op(variant)
    for size in subject.backend.capabilities.block_sizes:
        subject.binder.block_size = size
        check_attention(subject, op, [1, 1, 3, size + 1], [1, size, size + 3, size + 1], block_size=size)


@check("L1/attention/hints", DTYPES)
def test_the_cache_and_not_the_fresh_keys_defines_the_result(subject: Subject, variant: DType) -> None:
    """Fresh keys and values are hints; the result is that of the cache whether they are given or not."""
    op, size = attention_op(variant), subject.block_size
    step = PagedStep(subject, op, [3], [size + 3])
    attend, cache, plan, query = subject.bind(op), step.filled_cache(), step.plan(), step.device_query()
    without = subject.get(attend(AttentionArgs(query=query, cache=cache, plan=plan)))
    key, value = (subject.put(x[0][-3:]) for x in (step.keys, step.values))
    hinted = attend(AttentionArgs(query=step.device_query(), cache=cache, plan=step.plan(), key=key, value=value))
    bound = _bound(step, without.double(), _plain(step))
    subject.agree(op, hinted, without.double(), bound, "with hints, result")


@check("L1/attention/ragged", DTYPES)
def test_ragged_mode(subject: Subject, variant: DType) -> None:
    """Without a cache the keys are the step's own."""
    op = attention_op(variant, features=frozenset({"ragged"}))
    attend = subject.bind(op)
    cached = dataclasses.replace(op, features=frozenset())
    lens = [1, 5, subject.block_size + 1]
    step = PagedStep(subject, cached, lens, lens)
    if subject.backend.supports(cached, subject.target.device).kind == "NO":
        raise UnsupportedOutcome("no attention of that kind")
    key, value = (subject.put(torch.cat(x)) for x in (step.keys, step.values))
    args = AttentionArgs(query=step.device_query(), cache=None, plan=step.plan(), key=key, value=value)
    exact = step.exact(wide_op(cached))
    subject.agree(op, attend(args), exact, _bound(step, exact, _plain(step)))


@check("L1/merge_lse", DTYPES)
def test_merge_lse(subject: Subject, dice: torch.Generator, variant: DType) -> None:
    """Parts of very different weight; a part without keys; a token without any key."""
    op = MergeLseOp(dtype=variant, num_heads=3, v_head_dim=32)
    outs = torch.randn(4, 5, 3, 32, generator=dice).to(torch_dtype(variant))
    lses = torch.randn(4, 5, 3, generator=dice) * 8
    lses[1], lses[:, 2] = float("-inf"), float("-inf")
    merge = subject.bind(op)
    out, lse = merge(MergeLseArgs(outs=subject.put(outs), lses=subject.put(lses)))
    exact, exact_lse = oracle(wide_op(op))(MergeLseArgs(outs=outs.double(), lses=lses.double()))
    weights = torch.softmax(lses.double(), 0).nan_to_num()[..., None]
    magnitude = (weights * outs.double().abs()).sum(0)
    subject.agree(op, out, exact, pointwise_bound(exact, 3 * magnitude, outs.dtype))
    size = torch.where(exact_lse.isfinite(), exact_lse.abs() + 1, torch.tensor(1.0, dtype=torch.float64))
    subject.agree(op, lse, exact_lse, pointwise_bound(size, size, torch.float32), "lse")
