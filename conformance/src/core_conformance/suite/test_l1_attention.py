"""L1: attention against float64: shapes, dtypes, windows, mixed batches; poison wherever a request owns nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.backend.ops import AttentionArgs, AttentionOp
from core.spec import DType
from core_conformance.checks import check
from core_conformance.operations.attention_by_hand import attention_bound, attention_suspects
from core_conformance.operations.cache_memory import POISONS
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Mismatch, Subject, wide_op
from core_conformance.suite.test_l1_dense import DTYPES

_FORMS: dict[str, dict[str, Any]] = {
    "mha": {"num_heads": 2, "num_kv_heads": 2},
    "gqa": {"num_heads": 6, "num_kv_heads": 2},
    "mqa": {"num_heads": 4, "num_kv_heads": 1},
}


def attention_op(dtype: DType, **changes: Any) -> AttentionOp:
    """Grouped heads of 64."""
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "scale": 0.125}
    return AttentionOp(**({"dtype": dtype, "kv_dtype": dtype} | fields | changes))


def lens_of(size: int, name: str) -> tuple[list[int], list[int]]:
    """(query_lens, seq_lens) of a batch around the block boundary."""
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
    bound, suspects = attention_bound(step, exact), attention_suspects(step)
    for poison in POISONS:
        step.poison = poison
        out, what = step.run(), f"(memory {poison}) result"
        subject.agree(op, out[step.real], exact, bound, what, places=step.places, suspects=suspects)
        if not subject.get(out).isfinite().all():
            raise Mismatch(f"{op.describe()}: rows of padding must be finite, over memory {poison} they are not")


@check(
    "L1/attention",
    [f"{batch}-{form}-{d}" for batch in ("decode", "prefill", "chunk", "mixed") for form in _FORMS for d in DTYPES],
)
def test_shapes_around_the_block_boundary(subject: Subject, variant: str) -> None:
    """Decodes, whole prompts, chunks after a past, and all of it in one batch with a request without tokens."""
    batch, form, dtype = variant.split("-")
    check_attention(subject, attention_op(DTYPES[dtype], **_FORMS[form]), *lens_of(subject.block_size, batch))


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
        subject.equal(op, other, outs[0], "over other blocks, result", places=step.places)


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


@check("L1/attention/value-dim", [f"{dims}-{dtype}" for dims in ("96x64", "64x96") for dtype in DTYPES])
def test_values_of_another_size_than_keys(subject: Subject, variant: str) -> None:
    """Shorter values, as expanded latent attention has them, and longer ones."""
    dims, dtype = variant.split("-")
    dim, v_dim = map(int, dims.split("x"))
    op = attention_op(DTYPES[dtype], head_dim=dim, v_head_dim=v_dim)
    check_attention(subject, op, [1, 3], [subject.block_size + 1, 7])


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
    bound = attention_bound(step, without.double())
    subject.agree(op, hinted, without.double(), bound, "with hints, result", places=step.places)


@check("L1/attention/strided", DTYPES)
def test_queries_of_a_fused_product(subject: Subject, variant: DType) -> None:
    """Queries are a slice of a wider tensor, rows and heads with strides of their own; what lies beside them is NaN."""
    op, size = attention_op(variant), subject.block_size
    step = PagedStep(subject, op, [1, 4], [size + 1, 6])
    exact = step.exact(wide_op(op))
    fused = torch.full((step.num_tokens, op.num_heads + 3, op.head_dim + 32), float("nan"), dtype=step.query.dtype)
    view = _middle(subject.put(fused), op)
    subject.backend.to_device(step.query, view).wait()
    args = AttentionArgs(query=view, cache=step.filled_cache(), plan=step.plan())
    out, suspects = subject.bind(op)(args), attention_suspects(step)
    bound = attention_bound(step, exact)
    subject.agree(op, out, exact, bound, "(strided queries) result", places=step.places, suspects=suspects)


def _middle(fused: Tensor, op: AttentionOp) -> Tensor:
    return fused[:, 1 : 1 + op.num_heads, : op.head_dim]
