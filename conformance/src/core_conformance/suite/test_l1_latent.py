"""L1: latent attention, whole and sparse, and what comes before it, against formulations of the suite's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import MlaOp, MlaPrologArgs, MlaPrologOp, RmsNormOp, RopeOp
from core.spec import CacheKind, DType
from core_conformance.checks import check
from core_conformance.diagnosis import known
from core_conformance.operations.cache_memory import POISONS, export, int32, latent_cache, new_cache
from core_conformance.operations.latent import LatentStep, latent_bound, latent_by_hand, latent_suspects
from core_conformance.subject import Mismatch, Subject
from core_conformance.suite.test_l1_attention import lens_of
from core_conformance.suite.test_l1_cache import plan_of
from core_conformance.suite.test_l1_dense import DTYPES, norm_of, normal, rope_table, rotated
from core_conformance.suite.test_l1_probes import STRIDES, other_keys
from core_conformance.tolerance import pointwise_bound, probe_bound, reduction_bound, unit_roundoff

_KINDS = {**DTYPES, "kv-e4m3": DType.BFLOAT16}
"""Model types over a cache of the same type, and an 8-bit cache."""


def mla_op(name: str, **changes: Any) -> MlaOp:
    """Small heads: a latent of 64, a rotated part of 16."""
    dtype = _KINDS[name]
    kv_dtype = DType.FLOAT8_E4M3FN if name == "kv-e4m3" else dtype
    fields: dict[str, Any] = {"num_heads": 3, "latent_dim": 64, "rope_dim": 16, "scale": 0.125}
    return MlaOp(dtype=dtype, kv_dtype=kv_dtype, **(fields | changes))


@check("L1/mla", [f"{batch}-{name}" for batch in ("decode", "prefill", "chunk", "mixed") for name in _KINDS])
def test_latent_attention(subject: Subject, variant: str) -> None:
    """One latent key and value for all heads, causal, in batches around the block boundary; poison all around."""
    batch, name = variant.split("-", 1)
    op = mla_op(name)
    subject.bind(op)
    _check(subject, LatentStep(subject, op, *lens_of(subject.block_size, batch)))


@check("L1/mla/padding", DTYPES)
def test_padding_requests_are_finite_and_harmless(subject: Subject, variant: DType) -> None:
    """NaN queries, null block, slot -1: finite themselves, and unseen by others."""
    op = mla_op(_name(variant))
    subject.bind(op)
    _check(subject, LatentStep(subject, op, [1, 1], [subject.block_size + 1, 3], padding=2))


@check("L1/mla/permuted", DTYPES)
def test_block_tables_in_any_order(subject: Subject, variant: DType) -> None:
    """The same requests over other blocks give the same bits."""
    op, size = mla_op(_name(variant)), subject.block_size
    subject.bind(op)
    step = LatentStep(subject, op, [1, 5], [2 * size - 1, size + 5], seed=5)
    first = subject.get(step.run())
    for seed in (11, 12, 13):
        step.deal_blocks(seed)
        subject.equal(op, step.run(), first, "over other blocks, result", places=step.places)


@check("L1/mla/lse", DTYPES)
def test_log_sum_exp(subject: Subject, variant: DType) -> None:
    """The natural logarithm of the denominator, float32, beside an unchanged result."""
    op = mla_op(_name(variant), features=frozenset({"lse"}))
    subject.bind(op)
    step = LatentStep(subject, op, *lens_of(subject.block_size, "mixed"))
    lse = subject.put(torch.full((step.num_tokens, op.num_heads), float("nan")))
    out = step.run(lse=lse)
    exact, exact_lse = latent_by_hand(step)
    subject.agree(op, out, exact, latent_bound(step, exact), places=step.places, suspects=latent_suspects(step))
    limit = pointwise_bound(exact_lse, exact_lse.abs() + 8.0, torch.float32, 64)
    subject.agree(op, lse, exact_lse, limit, "lse", places=step.places)


@check("L1/mla/sparse", [f"{batch}-{name}" for batch in ("decode", "mixed") for name in _KINDS])
def test_sparse_attention_reads_the_chosen_keys_alone(subject: Subject, variant: str) -> None:
    """Positions in any order, some queries with fewer than asked for: -1 chooses nothing."""
    batch, name = variant.split("-", 1)
    op = mla_op(name, features=frozenset({"sparse", "lse"}))
    subject.bind(op)
    step = LatentStep(subject, op, *lens_of(subject.block_size, batch))
    _check(subject, step, step.indices(7))


@check("L1/mla/counting", [f"{form}-{dtype}" for form in ("full", "sparse") for dtype in DTYPES])
def test_counting(subject: Subject, variant: str) -> None:
    """q = 0 and latents one-hot by key index: a result is the share of its keys."""
    form, name = variant.split("-")
    op = mla_op(name, features=frozenset({"sparse"} if form == "sparse" else ()))
    subject.bind(op)
    size = subject.block_size
    for stride in STRIDES:
        step = LatentStep(subject, op, [1, 1, 1, 5, size + 1], [size - 1, size, size + 1, 2 * size + 5, size + 1])
        step.q_latent.zero_(), step.q_rope.zero_()
        for keys in step.keys:
            keys.zero_()
            place = torch.arange(len(keys)) // stride % op.latent_dim
            keys[:, 0, : op.latent_dim] = torch.nn.functional.one_hot(place, op.latent_dim).to(keys.dtype)
        indices = step.indices(9) if form == "sparse" else None
        ranges = [range(position + 1) for _, position in step.queries]
        sets = [list(r) for r in ranges] if indices is None else [row[row >= 0].tolist() for row in indices]
        exact = _shares(op, sets, stride)
        others = other_keys(ranges, [step.seq_lens[row] for row, _ in step.queries]) if indices is None else {}
        suspects = known({fault: _shares(op, [list(r) for r in keys], stride) for fault, keys in others.items()})
        bound = probe_bound(exact, torch_dtype(op.dtype))
        for poison in POISONS:
            step.poison = poison
            what = f"(keys counted, stride {stride}, memory {poison}) share"
            subject.agree(op, step.run(indices=indices), exact, bound, what, places=step.places, suspects=suspects)


def _shares(op: MlaOp, sets: list[list[int]], stride: int) -> Tensor:
    rows = []
    for keys in sets:
        counts = torch.bincount(torch.tensor(keys) // stride % op.latent_dim, minlength=op.latent_dim)
        rows.append(counts.double() / len(keys))
    return torch.stack(rows)[:, None].expand(-1, op.num_heads, -1)


@check("L1/mla/rope-part", DTYPES)
def test_the_rotated_part_of_the_key_chooses(subject: Subject, variant: DType) -> None:
    """Latent queries are 0: the rotated parts prefer one key by far, another one for each head."""
    op = mla_op(_name(variant), scale=1.0)
    subject.bind(op)
    size = subject.block_size
    step = LatentStep(subject, op, [1], [size + 2])
    wanted = [0, size - 1, size]
    step.q_latent.zero_(), step.q_rope.zero_(), step.keys[0].zero_()
    for head, position in enumerate(wanted):
        step.q_rope[0, head, head] = 8.0
        step.keys[0][position, 0, op.latent_dim + head] = 8.0
        step.keys[0][position, 0, head] = 1.0
    exact = torch.zeros(1, 3, op.latent_dim, dtype=torch.float64)
    exact[0, range(3), range(3)] = 1.0
    subject.agree(op, step.run(), exact, 1e-6 + 2 * unit_roundoff(torch_dtype(variant)), "(preferred key) result")


@check("L1/mla_prolog", [f"{form}-{dtype}" for form in ("pairs", "halves") for dtype in DTYPES])
def test_what_comes_before_latent_attention(subject: Subject, dice: torch.Generator, variant: str) -> None:
    """Norm of the latent, rope of both rotated parts, absorbed queries, and the cache; other slots keep their bits."""
    form, name = variant.split("-")
    dtype, heads, nope, latent, rope = DTYPES[name], 3, 24, 64, 16
    op = MlaPrologOp(
        dtype=dtype, num_heads=heads, nope_dim=nope, latent_dim=latent, rope_dim=rope, kv_dtype=dtype, eps=1e-5,
        interleaved=form == "pairs",
    )  # fmt: skip
    prolog, size = subject.bind(op), subject.block_size
    slots = [size + 1, -1, 2 * size - 1, 2 * size, size, 3 * size + 2]
    slab = new_cache(subject, latent_cache(CacheKind.MLA, latent + rope, dtype), size, 5, "large")
    before = export(subject, slab, range(5))[0]
    q, kv = normal(dice, dtype, len(slots), heads, nope + rope), normal(dice, dtype, len(slots), latent + rope)
    weight, up = normal(dice, dtype, latent), normal(dice, dtype, heads, latent, nope)
    positions, table = int32([(7 * i) % 64 for i in range(len(slots))]), rope_table(64, rope)
    put = subject.put
    args = MlaPrologArgs(
        q=put(q),
        kv=put(kv),
        kv_weight=put(weight),
        k_up=subject.pack({"weight": up}, "none", up.shape, dtype, role="experts"),
        positions=put(positions),
        cos_sin=put(table),
        cache=slab.views(),
        plan=plan_of(subject, slots, slab, op),
    )
    q_latent, q_rope = prolog(args)
    a, b = q[..., :nope].double(), up.double()
    exact, magnitude = torch.einsum("thn,hln->thl", a, b), torch.einsum("thn,hln->thl", a.abs(), b.abs())
    kind = torch_dtype(dtype)
    subject.agree(op, q_latent, exact, reduction_bound(exact, magnitude, nope, kind), "q_latent")
    turn = RopeOp(
        dtype=dtype, num_heads=heads, num_kv_heads=1, head_dim=rope, rotary_dim=rope, interleaved=op.interleaved
    )
    angles = table[positions.long()]
    exact, magnitude = rotated(turn, q[..., nope:], angles)
    subject.agree(op, q_rope, exact, pointwise_bound(exact, magnitude, kind, 4), "q_rope")
    normed, limit = norm_of(RmsNormOp(dtype=dtype, dim=latent, eps=op.eps), kv[:, :latent], weight)
    turned, magnitude = rotated(turn, kv[:, None, latent:], angles)
    stored = torch.cat((normed, turned[:, 0]), -1)
    bounds = torch.cat((limit, pointwise_bound(turned, magnitude, kind, 4)[:, 0]), -1)
    _check_stored(subject, op, export(subject, slab, range(5))[0], before, slots, stored, bounds)


def _check_stored(
    subject: Subject, op: MlaPrologOp, after: Tensor, before: Tensor, slots: list[int], stored: Tensor, bounds: Tensor
) -> None:
    """Slots that were named hold their rows within the bound, all others what they held."""
    tokens = [token for token, slot in enumerate(slots) if slot >= 0]
    named = [slots[token] for token in tokens]
    subject.agree(op, after[named][:, 0], stored[tokens], bounds[tokens], "cached row")
    rest = torch.ones(len(after), dtype=torch.bool)
    rest[named] = False
    subject.equal(op, after[rest], before[rest], "slot that was not named")


def _name(dtype: DType) -> str:
    return next(name for name, value in DTYPES.items() if value is dtype)


def _check(subject: Subject, step: LatentStep, indices: Tensor | None = None) -> None:
    op = step.op
    exact, exact_lse = latent_by_hand(step, indices=indices)
    bound, suspects = latent_bound(step, exact, indices), latent_suspects(step, indices)
    for poison in POISONS:
        step.poison = poison
        lse = subject.put(torch.full((step.num_tokens, op.num_heads), float("nan"))) if op.has("lse") else None
        out, what = step.run(indices=indices, lse=lse), f"(memory {poison}) result"
        subject.agree(op, out[step.real], exact, bound, what, places=step.places, suspects=suspects)
        if not subject.get(out).isfinite().all():
            raise Mismatch(f"{op.describe()}: rows of padding must be finite, over memory {poison} they are not")
        if lse is not None:
            limit = pointwise_bound(exact_lse, exact_lse.abs() + 8.0, torch.float32, 64)
            subject.agree(op, lse[step.real], exact_lse, limit, "lse", places=step.places)
