"""L1: attention probes with answers known in closed form: which keys are read, by which head, with which weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import known, logit_factor
from core_conformance.operations.cache_memory import POISONS
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Subject, wide_op
from core_conformance.suite.test_l1_attention import attention_op
from core_conformance.suite.test_l1_dense import DTYPES
from core_conformance.tolerance import U_ACC, probe_bound, unit_roundoff

STRIDES = (1, 5, 64)
"""Key j is named by j // stride % head_dim: neighbours by the first, distant keys by the others."""


def _seen(op: AttentionOp, position: int, length: int) -> range:
    """Keys that the query at a position sees."""
    if not op.causal:
        return range(length)
    return range(max(0, position - op.window + 1) if op.window else 0, position + 1)


@check(
    "L1/attention/counting",
    [f"{form}-{dtype}" for form in ("full", "window", "bidirectional") for dtype in DTYPES],
)
def test_counting(subject: Subject, variant: str) -> None:
    """q = 0 and values one-hot by key index: a result is the share of its keys; one too many or too few shows."""
    name, dtype = variant.split("-")
    size = subject.block_size
    op = attention_op(DTYPES[dtype], window=size // 2 + 3 if name == "window" else 0, causal=name != "bidirectional")
    for stride in STRIDES:
        step = counting_step(subject, op, stride)
        ranges = [_seen(op, position, step.seq_lens[row]) for row, position in step.queries]
        exact = shares(op, ranges, stride)
        bound = probe_bound(exact, torch_dtype(op.dtype))

        ends = [step.seq_lens[row] for row, _ in step.queries]
        others = other_keys(ranges, ends, op.window)
        suspects = known({fault: shares(op, other, stride) for fault, other in others.items()})
        for poison in POISONS:
            step.poison = poison
            what = f"(keys counted, stride {stride}, memory {poison}) share"
            subject.agree(op, step.run(), exact, bound, what, places=step.places, suspects=suspects)


def counting_step(subject: Subject, op: AttentionOp, stride: int) -> PagedStep:
    """Decodes, a chunk and a prompt around the block boundary whose logits are zero, values one-hot by key index."""
    size = subject.block_size
    query, seq = [1, 1, 1, 1, 5, size + 1], [1, size - 1, size, size + 1, 2 * size + 5, size + 1]
    step = PagedStep(subject, op, query, seq, seed=stride)
    step.query.zero_()
    for values in step.values:
        place = torch.arange(len(values)) // stride % op.v_head_dim
        values.copy_(torch.nn.functional.one_hot(place, op.v_head_dim)[:, None].expand(-1, op.num_kv_heads, -1))
    return step


def shares(op: AttentionOp, ranges: list[range], stride: int) -> Tensor:
    """[queries, num_heads, v_head_dim]: which share of a query's keys has each name."""
    rows = []
    for keys in ranges:
        counts = torch.bincount(torch.tensor(list(keys)) // stride % op.v_head_dim, minlength=op.v_head_dim)
        rows.append(counts.double() / max(len(keys), 1))
    return torch.stack(rows)[:, None].expand(-1, op.num_heads, -1)


def other_keys(ranges: list[range], ends: list[int], window: int = 0) -> dict[str, list[range]]:
    """What kernels read that are off by one: keys of each query that has so many of its request's."""
    first = [range(r.start, max(r.stop - 1, r.start + 1)) for r in ranges]
    found = {
        "tail: the newest key of each query is left out": first,
        "mask: each query reads one key past its position": [
            range(r.start, min(r.stop + 1, end)) for r, end in zip(ranges, ends, strict=True)
        ],
        "tail: the first key of each query is left out": [range(r.start + 1, r.stop) or r for r in ranges],
        "mask: queries read later keys of their request": [
            range(r.start, end) for r, end in zip(ranges, ends, strict=True)
        ],
    }
    if window:
        cut = [len(r) == window for r in ranges]
        found["window: off by one, a key too many at its old end"] = [
            range(max(0, r.start - c), r.stop) for r, c in zip(ranges, cut, strict=True)
        ]
        found["window: off by one, a key too few at its old end"] = [
            range(r.start + c, r.stop) for r, c in zip(ranges, cut, strict=True)
        ]
    return found


@check("L1/attention/counting-lse", DTYPES)
def test_the_log_sum_exp_counts_keys(subject: Subject, variant: DType) -> None:
    """q = 0: the log-sum-exp is the logarithm of the number of keys."""
    op = attention_op(variant, features=frozenset({"lse"}))
    subject.bind(op)
    step = counting_step(subject, op, 1)
    lse = subject.put(torch.full((step.num_tokens, op.num_heads), float("nan")))
    step.run(lse=lse)
    counts = torch.tensor([position + 1.0 for _, position in step.queries], dtype=torch.float64)
    exact = counts.log()[:, None].expand(-1, op.num_heads)
    subject.agree(op, lse, exact, 16 * U_ACC * (1 + exact), "lse (number of keys)", places=step.places)


@check("L1/attention/scale", DTYPES)
def test_two_keys_with_a_fixed_gap(subject: Subject, variant: DType) -> None:
    """Two keys whose logits differ by exactly ln 3: the values mix 3 to 1, whatever the scale is called.

    Once near 0, and once at 60, where logits in half precision would lose the difference.
    """
    op = attention_op(variant, scale=0.25)
    dtype = torch_dtype(variant)
    step = PagedStep(subject, op, [1], [2])
    step.query.zero_()
    step.query[..., 0] = 4.0
    gap = torch.tensor(math.log(3.0)).to(dtype)
    step.keys[0].zero_()
    step.keys[0][1, :, 0] = gap
    step.values[0].zero_()
    step.values[0][0, :, 0] = 1.0
    step.values[0][1, :, 1] = 1.0

    def mixed(factor: float) -> Tensor:
        high = 1.0 / (1.0 + math.exp(-float(gap) * factor))
        exact = torch.zeros(1, op.num_heads, op.v_head_dim, dtype=torch.float64)
        exact[..., 0], exact[..., 1] = 1 - high, high
        return exact

    def suspects(got: Tensor) -> dict[str, Tensor]:
        factor = logit_factor((float(got[0, 0, 0]), float(got[0, 0, 1])), float(gap))
        return {f"scale: logits are multiplied by {factor:.4g} more than they should be": mixed(factor)}

    exact = mixed(1.0)
    step.query[..., 1] = 4.0
    for logit in (0.0, 60.0):
        step.keys[0][..., 1] = logit
        what = f"(two keys, logits from {logit:g}) result"
        subject.agree(op, step.run(), exact, probe_bound(exact, dtype), what, suspects=suspects)


@check("L1/attention/head-map", [f"{heads}-{dtype}" for heads in ("4x2", "6x3", "6x1", "3x3") for dtype in DTYPES])
def test_head_map(subject: Subject, variant: str) -> None:
    """Each key head has a value of its own: query head h must show that of key head h // (heads // kv_heads)."""
    shape, dtype = variant.split("-")
    heads, kv_heads = map(int, shape.split("x"))
    op = attention_op(DTYPES[dtype], num_heads=heads, num_kv_heads=kv_heads)
    step = PagedStep(subject, op, [1, 2], [subject.block_size + 1, 5])
    for values in step.values:
        values.copy_(torch.arange(1.0, kv_heads + 1)[None, :, None].expand(*values.shape))
    out = step.run()
    owner = torch.arange(heads) // (heads // kv_heads) + 1.0
    exact = owner.double()[None, :, None].expand(*out.shape)
    bound = 2 * unit_roundoff(torch_dtype(op.dtype)) * exact + 16 * U_ACC * exact

    modulo = (torch.arange(heads) % kv_heads + 1.0).double()[None, :, None].expand(*out.shape)
    suspects = known({"head map: query head h reads key head h % num_kv_heads": modulo})
    subject.agree(op, out, exact, bound, "(value of the key head) result", suspects=suspects)


@check("L1/attention/key-heads", DTYPES)
def test_keys_of_the_right_head_are_read(subject: Subject, variant: DType) -> None:
    """Key head g prefers key g by far: query heads of group g must show the value of key g."""
    op = attention_op(variant, num_heads=6, num_kv_heads=3, scale=1.0)
    step = PagedStep(subject, op, [1], [subject.block_size + 2])
    step.query.zero_()
    step.query[..., 0] = 8.0
    step.keys[0].zero_()
    for group in range(3):
        step.keys[0][group, group, 0] = 8.0
    step.values[0].copy_(torch.arange(len(step.values[0]))[:, None, None].expand(*step.values[0].shape))
    exact = (torch.arange(6) // 2).double()[None, :, None].expand(1, 6, op.v_head_dim)
    bound = 1e-6 + 2 * unit_roundoff(torch_dtype(variant)) * exact

    modulo = (torch.arange(6) % 3).double()[None, :, None].expand(1, 6, op.v_head_dim)
    suspects = known({"head map: query head h reads key head h % num_kv_heads": modulo})
    subject.agree(op, step.run(), exact, bound, "(preferred key) result", suspects=suspects)


@check("L1/attention/order", DTYPES)
def test_each_position_is_read_from_its_own_slot(subject: Subject, variant: DType) -> None:
    """Every query prefers one key by far, another one each: the value of exactly that position must come back."""
    size = subject.block_size
    op = attention_op(variant, num_heads=2, num_kv_heads=1, scale=1.0)
    wanted = [0, size - 1, size, size + 1, 2 * size - 1, 2 * size]
    for position in wanted:
        step = PagedStep(subject, op, [1], [2 * size + 1], seed=position)
        step.query.zero_()
        step.query[..., 0] = 8.0
        step.keys[0].zero_()
        step.keys[0][position, :, 0] = 8.0
        step.values[0].zero_()
        step.values[0][position] = 1.0
        subject.agree(
            op,
            step.run(),
            torch.ones(1, 2, op.v_head_dim, dtype=torch.float64),
            1e-6 + 2 * unit_roundoff(torch_dtype(variant)),
            f"(position {position} preferred) result",
            suspects=lambda got: {"slot: another position was read in its place": torch.zeros_like(got)},
        )


@check("L1/attention/large-logits", DTYPES)
def test_large_logits_do_not_overflow(subject: Subject, variant: DType) -> None:
    """Logits of hundreds: the softmax must subtract its peak; the largest key wins."""
    op = attention_op(variant, scale=1.0)
    step = PagedStep(subject, op, [1], [subject.block_size + 3])
    step.query.zero_()
    step.query[..., :8] = 8.0
    for sign in (1.0, -1.0):
        ramp = torch.linspace(-4, 4, len(step.keys[0])) * sign
        step.keys[0].copy_(ramp[:, None, None].expand(*step.keys[0].shape))
        exact = step.exact(wide_op(op))
        bound = 4 * unit_roundoff(torch_dtype(variant)) * float(step.values[0].float().abs().max()) + 1e-4
        subject.agree(op, step.run(), exact, bound, "(logits of hundreds) result")
