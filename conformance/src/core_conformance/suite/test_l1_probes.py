"""L1: attention probes with answers known in closed form: which keys are read, by which head, with which weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import AttentionOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.paged import POISONS, PagedStep
from core_conformance.subject import Subject, wide_op
from core_conformance.suite.test_l1_attention import attention_op
from core_conformance.suite.test_l1_dense import DTYPES
from core_conformance.tolerance import U_ACC, probe_bound, unit_roundoff


def _seen(op: AttentionOp, position: int) -> range:
    """Keys that the query at a position sees."""
    return range(max(0, position - op.window + 1) if op.window else 0, position + 1)


def _positions(step: PagedStep) -> list[tuple[int, int]]:
    """(request, position) of each query."""
    pairs = []
    for row, (count, length) in enumerate(zip(step.query_lens, step.seq_lens, strict=True)):
        pairs += [(row, position) for position in range(length - count, length)]
    return pairs


@check("L1/attention/counting", [f"{window}-{dtype}" for window in ("full", "window") for dtype in DTYPES])
def test_counting(subject: Subject, variant: str) -> None:
    """q = 0 and values one-hot by key index: a result is the share of its keys, so one key too many or too few shows.

    Two strides name a key: its index modulo the head's size, and its index divided by it.
    """
    name, dtype = variant.split("-")
    size = subject.block_size
    window = {"full": 0, "window": size // 2 + 3}[name]
    op = attention_op(DTYPES[dtype], window=window)
    query, seq = [1, 1, 1, 1, 5, size + 1], [1, size - 1, size, size + 1, 2 * size + 5, size + 1]
    for stride in (1, op.v_head_dim):
        step = PagedStep(subject, op, query, seq, seed=stride)
        step.query.zero_()
        for values in step.values:
            place = torch.arange(len(values)) // stride % op.v_head_dim
            values.copy_(torch.nn.functional.one_hot(place, op.v_head_dim)[:, None].expand(-1, 2, -1))
        for poison in POISONS:
            step.poison = poison
            exact = torch.stack([_shares(op, position, stride) for _, position in _positions(step)])
            exact = exact[:, None].expand(-1, op.num_heads, -1)
            bound = probe_bound(exact, torch_dtype(op.dtype))
            subject.agree(op, step.run(), exact, bound, f"(keys counted, stride {stride}, memory {poison}) share")


def _shares(op: AttentionOp, position: int, stride: int) -> Tensor:
    keys = torch.tensor(list(_seen(op, position)))
    counts = torch.bincount(keys // stride % op.v_head_dim, minlength=op.v_head_dim)
    return counts.double() / len(keys)


@check("L1/attention/scale", DTYPES)
def test_two_keys_with_a_fixed_gap(subject: Subject, variant: DType) -> None:
    """Two keys whose logits differ by exactly ln 3: the values mix 3 to 1, whatever the scale is called."""
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
    high = 1.0 / (1.0 + math.exp(-float(gap)))
    exact = torch.zeros(1, op.num_heads, op.v_head_dim, dtype=torch.float64)
    exact[..., 0], exact[..., 1] = 1 - high, high
    subject.agree(op, step.run(), exact, probe_bound(exact, dtype), "(two keys) result")


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
    subject.agree(op, out, exact, bound, "(value of the key head) result")


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
    subject.agree(
        op, step.run(), exact, 1e-6 + 2 * unit_roundoff(torch_dtype(variant)) * exact, "(preferred key) result"
    )


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
