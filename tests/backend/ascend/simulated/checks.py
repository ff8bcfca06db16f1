"""One check an operation: the device's answer against the oracle. Mutants must make one of them fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import Packed, torch_dtype
from core.backend.ops import (
    AttentionOp,
    ExpertsArgs,
    ExpertsOp,
    IndexTopkArgs,
    IndexTopkOp,
    LinearArgs,
    LinearOp,
    MlaOp,
    MlaPrologArgs,
    MlaPrologOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
    RouteArgs,
    RouteOp,
)
from core.backend.schemes import quantize_int4_group, quantize_int8
from core.spec import CacheKind, DType
from core_conformance.operations.cache_memory import latent_cache
from core_conformance.operations.latent import LatentStep, latent_by_hand
from core_conformance.operations.paged import PagedCache, PagedStep
from core_conformance.operations.recurrent import Lane, StateStep
from core_conformance.operations.recurrent_layers import gated_delta
from core_conformance.subject import Subject, oracle, wide_op

__all__ = ["CHECKS", "attention_step", "delta_step", "experts_case", "latent_step", "prolog_case"]

BF16 = DType.BFLOAT16


def close(got: Tensor, exact: Tensor, bound: float, what: str) -> None:
    """|got - exact| is at most `bound` times the largest magnitude, everywhere."""
    assert got.shape == exact.shape, f"{what}: {tuple(got.shape)} is not {tuple(exact.shape)}"
    scale = float(exact.abs().max()) or 1.0
    error = float((got.double() - exact.double()).abs().max())
    assert error <= bound * scale, f"{what}: off by {error:.3g}, allowed are {bound * scale:.3g}"


def attention_step(
    subject: Subject,
    lengths: tuple[list[int], list[int]] = ([1, 1, 5, 30], [130, 64, 140, 30]),
    *,
    padding: int = 0,
    **changes: Any,
) -> None:
    """Attention of a mixed step over poisoned blocks."""
    fields: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "scale": 0.125}
    op = AttentionOp(**({"dtype": BF16, "kv_dtype": BF16} | fields | changes))
    assert subject.is_native(op), subject.binder.resolve(op).reason
    step = PagedStep(subject, op, *lengths, padding=padding)
    sinks = torch.linspace(-1, 2, op.num_heads).bfloat16().float() if op.has("sinks") else None
    lse = torch.zeros(step.num_tokens, op.num_heads) if op.has("lse") else None
    got = step.run(sinks=sinks, lse=lse)
    wide = torch.zeros(step.num_tokens, op.num_heads, dtype=torch.float64) if op.has("lse") else None
    exact = step.exact(wide_op(op), sinks=None if sinks is None else sinks.double(), lse=wide)
    close(got[step.real], exact[step.real], 0.01, "attention")
    assert bool(got.isfinite().all()), "rows of padding are not finite"
    if lse is not None and wide is not None:
        close(lse[step.real], wide[step.real], 1e-3, "log-sum-exp")


def latent_step(
    subject: Subject, heads: int, queries: list[int], keys: list[int], *, padding: int = 0, sparse: int = 0
) -> LatentStep:
    """Latent attention at DeepSeek's sizes."""
    features = frozenset({"sparse"}) if sparse else frozenset({"lse"})
    op = MlaOp(dtype=BF16, num_heads=heads, latent_dim=512, rope_dim=64, kv_dtype=BF16, scale=0.05, features=features)
    assert subject.is_native(op), subject.binder.resolve(op).reason
    step = LatentStep(subject, op, queries, keys, padding=padding)
    indices = step.indices(sparse) if sparse else None
    lse = None if sparse else torch.zeros(step.num_tokens, heads)
    got = step.run(indices=indices, lse=lse)
    exact, total = latent_by_hand(step, indices=indices)
    close(got[step.real], exact, 0.01, "latent attention")
    assert bool(got.isfinite().all()), "rows of padding are not finite"
    if lse is not None:
        close(lse[step.real], total, 1e-3, "log-sum-exp")
    return step


def delta_step(subject: Subject, *, drafts: int = 0, checkpoint: int = -1) -> None:
    """The delta rule at the sizes of the calls: fresh and running requests, with and without drafts."""
    layer = gated_delta(BF16, num_k_heads=2, num_v_heads=4, k_dim=128, v_dim=128, scale=128**-0.5)
    assert subject.is_native(layer.op), subject.binder.resolve(layer.op).reason
    width = 1 + drafts
    slots = iter(range(1, 9))
    own = [tuple(next(slots) for _ in range(width)) for _ in range(2)]
    lanes = [
        Lane(tokens=1, slots=own[0], accepted=min(2, width)),
        Lane(tokens=12, slots=own[1], accepted=0, checkpoint=checkpoint),
    ]
    if drafts:
        lanes.insert(1, Lane(tokens=width, slots=(6 + 1, 6 + 2, 10)[:width], accepted=1, checkpoint=-1))
    step = StateStep(subject, layer, lanes, num_slots=16)
    plane = step.plane("nan")
    got = step.run(plane)
    exact, states = step.exact()
    close(got[: step.num_tokens], exact, 0.03, "gated delta rule")
    for slot, state in states.items():
        close(plane[slot], state, 0.02, f"state of slot {slot}")
    touched = set(states) | {slot for lane in lanes for slot in lane.slots}
    assert bool(plane[[slot for slot in range(16) if slot not in touched]].isnan().all()), "a foreign slot was written"


def experts_case(subject: Subject, scheme: str = "none", *, first_expert: int = 0) -> None:
    """Experts of which some are another rank's, and tokens of padding with the id -1."""
    op = ExpertsOp(
        dtype=BF16, num_experts=4, hidden_size=64, intermediate_size=32, top_k=2, scheme=scheme,
        first_expert=first_expert,
    )  # fmt: skip
    assert subject.is_native(op), subject.binder.resolve(op).reason
    dice = torch.Generator().manual_seed(3)
    packs, hosts = [], []
    for rows, columns in ((64, 64), (64, 32)):
        dense = torch.randn(4, rows, columns, generator=dice).bfloat16() / 8
        parts = {"weight": dense}
        if scheme == "int8":
            parts = dict(zip(("weight", "scale"), quantize_int8(dense), strict=True))
        packs.append(subject.pack(parts, scheme, (4, rows, columns), BF16, role="experts"))
        hosts.append(Packed(shape=(4, rows, columns), scheme=scheme, tensors=parts))
    x = torch.randn(9, 64, generator=dice).bfloat16()
    ids = torch.stack([torch.randperm(8, generator=dice)[:2] for _ in range(9)]).to(torch.int32)
    ids[-1] = -1
    weights = torch.rand(9, 2, generator=dice)
    got = subject.bind(op)(ExpertsArgs(x=x.clone(), gate_up=packs[0], down=packs[1], weights=weights, expert_ids=ids))
    exact = oracle(wide_op(op))(
        ExpertsArgs(x=x.double(), gate_up=hosts[0], down=hosts[1], weights=weights, expert_ids=ids)
    )
    close(got, exact, 0.03, f"experts {scheme}")


def prolog_case(subject: Subject) -> None:
    """The prolog at DeepSeek's sizes: what it returns, and what it stores."""
    op = MlaPrologOp(dtype=BF16, num_heads=3, nope_dim=128, latent_dim=512, rope_dim=64, kv_dtype=BF16, eps=1e-6)
    assert subject.is_native(op), subject.binder.resolve(op).reason
    spec = latent_cache(CacheKind.MLA, 576, BF16)
    paged = PagedCache(subject, spec, (op,), [1, 3], [130, 3], padding=1)
    dice = torch.Generator().manual_seed(5)
    tokens = paged.num_tokens
    q = torch.randn(tokens, 3, 192, generator=dice).bfloat16()
    kv = torch.randn(tokens, 576, generator=dice).bfloat16()
    kv_weight = torch.rand(512, generator=dice).bfloat16()
    up = torch.randn(3, 512, 128, generator=dice).bfloat16() / 16
    cos_sin = torch.randn(256, 64, generator=dice)
    batch = paged.batch(on_device=True)
    cache = paged.filled_cache()
    args: dict[str, Any] = {"kv_weight": kv_weight, "positions": batch.positions, "cos_sin": cos_sin}
    packed = subject.pack({"weight": up}, "none", (3, 512, 128), BF16, role="experts")
    latent, turned = subject.bind(op)(
        MlaPrologArgs(q=q.clone(), kv=kv.clone(), k_up=packed, cache=cache, plan=paged.plan(), **args)
    )
    host = paged.host_cache()
    want_latent, want_turned = oracle(dataclasses.replace(op, dtype=DType.FLOAT32))(
        MlaPrologArgs(
            q=q.float(), kv=kv.float(), k_up=Packed(shape=(3, 512, 128), scheme="none", tensors={"weight": up}),
            cache=host, plan=paged.host_plan(), **args,
        )
    )  # fmt: skip
    close(latent[paged.real], want_latent[paged.real], 0.02, "absorbed queries")
    close(turned[paged.real], want_turned[paged.real], 0.01, "turned queries")
    for row, length in enumerate(paged.seq_lens):
        slot = paged.slot(row, length - 1)
        got = torch.cat([plane.flatten(0, 1)[slot] for plane in cache], -1)
        close(got, host[0].flatten(0, 1)[slot], 0.02, f"what request {row} keeps")


def index_case(subject: Subject) -> None:
    """The index call chooses the best positions."""
    op = IndexTopkOp(dtype=BF16, num_heads=4, head_dim=128, top_k=16, kv_dtype=BF16)
    assert subject.is_native(op), subject.binder.resolve(op).reason
    paged = PagedCache(subject, latent_cache(CacheKind.INDEX, 128, BF16), (op,), [1, 3], [200, 9])
    dice = torch.Generator().manual_seed(6)
    query = torch.randn(paged.num_tokens, 4, 128, generator=dice).bfloat16()
    weights = torch.rand(paged.num_tokens, 4, generator=dice).bfloat16().float()
    got = subject.bind(op)(IndexTopkArgs(query=query, weights=weights, cache=paged.filled_cache(), plan=paged.plan()))
    want = oracle(wide_op(op))(
        IndexTopkArgs(query=query.double(), weights=weights, cache=paged.host_cache(), plan=paged.host_plan())
    )
    assert torch.equal(got.sort(-1).values, want.to(torch.int32).sort(-1).values), "other positions were chosen"


def route_case(subject: Subject, **changes: Any) -> None:
    """Experts and their weights."""
    fields: dict[str, Any] = {"num_experts": 32, "top_k": 4}
    op = RouteOp(dtype=BF16, **(fields | changes))
    assert subject.is_native(op), subject.binder.resolve(op).reason
    logits = torch.randn(7, 32, generator=torch.Generator().manual_seed(2))
    bias = torch.rand(32, generator=torch.Generator().manual_seed(1)) / 4 if op.has("bias") else None
    weights, ids = subject.bind(op)(RouteArgs(router_logits=logits, bias=bias))
    want_weights, want_ids = oracle(wide_op(op))(RouteArgs(router_logits=logits.double(), bias=bias))
    assert torch.equal(ids, want_ids), "other experts were chosen"
    close(weights, want_weights, 1e-4, "weights of experts")


def linear_case(subject: Subject, scheme: str, rows: int = 48, columns: int = 64) -> None:
    """A product with a stored weight."""
    dtype = DType.FLOAT16 if scheme == "int4_group" else BF16
    op = LinearOp(
        dtype=dtype, in_features=columns, out_features=rows, scheme=scheme, weight_dtype=dtype, out_dtype=dtype
    )
    assert subject.is_native(op), subject.binder.resolve(op).reason
    dice = torch.Generator().manual_seed(4)
    dense = torch.randn(rows, columns, generator=dice).bfloat16()
    parts = {"weight": dense}
    if scheme == "int8":
        parts = dict(zip(("weight", "scale"), quantize_int8(dense), strict=True))
    if scheme == "int4_group":
        parts = dict(zip(("weight", "scale", "zero"), quantize_int4_group(dense, 32), strict=True))
    packed = subject.pack(parts, scheme, (rows, columns), dtype)
    x = torch.randn(5, columns, generator=dice).to(torch_dtype(dtype))
    got = subject.bind(op)(LinearArgs(x=x, weight=packed))
    host = Packed(shape=(rows, columns), scheme=scheme, tensors=parts)
    close(got, oracle(wide_op(op))(LinearArgs(x=x.double(), weight=host)), 0.01, f"linear {scheme}")
    exactness = 0.01 if scheme == "int4_group" else 1e-6
    close(packed.dense(), host.dense().float(), exactness, "the packed weight, read back")


def rope_case(subject: Subject, *, interleaved: bool) -> None:
    """Rotation of a part of each head."""
    op = RopeOp(dtype=BF16, num_heads=3, num_kv_heads=1, head_dim=64, rotary_dim=32, interleaved=interleaved)
    dice = torch.Generator().manual_seed(8)
    query, key = (torch.randn(5, heads, 64, generator=dice).bfloat16() for heads in (3, 1))
    angles = torch.rand(40, 16, generator=dice) * 6
    args: dict[str, Any] = {
        "positions": torch.tensor([3, 0, 39, 7, 7], dtype=torch.int32),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), -1),
    }
    got = subject.bind(op)(RopeArgs(query=query.clone(), key=key.clone(), **args))
    want = oracle(wide_op(op))(RopeArgs(query=query.double(), key=key.double(), **args))
    for name, a, b in zip(("query", "key"), got, want, strict=True):
        close(a, b, 0.005, f"turned {name}")


def norm_case(subject: Subject, offset: float) -> None:
    """The norm, with a residual."""
    op = RmsNormOp(dtype=BF16, dim=64, eps=0.5, weight_offset=offset, features=frozenset({"residual"}))
    dice = torch.Generator().manual_seed(9)
    x, residual = (torch.randn(4, 64, generator=dice).bfloat16() for _ in range(2))
    weight = torch.randn(64, generator=dice).bfloat16()
    y, total = subject.bind(op)(RmsNormArgs(x=x, weight=weight, residual=residual))
    want, sum_ = oracle(dataclasses.replace(op, dtype=DType.FLOAT32))(
        RmsNormArgs(x=x, weight=weight, residual=residual)
    )
    close(y, want, 0.01, "norm")
    close(total, sum_.to(torch_dtype(BF16)), 0.005, "sum")


CHECKS: dict[str, Callable[[Subject], Any]] = {
    "attention": attention_step,
    "attention-lse": lambda s: attention_step(s, features=frozenset({"lse"})),
    "attention-padding": lambda s: attention_step(s, ([1, 1], [130, 64]), padding=2),
    "attention-sinks": lambda s: attention_step(s, features=frozenset({"sinks"})),
    "attention-window": lambda s: attention_step(s, window=40),
    "delta": delta_step,
    "delta-drafts": lambda s: delta_step(s, drafts=2),
    "experts": experts_case,
    "experts-int8": lambda s: experts_case(s, "int8"),
    "index": index_case,
    "latent": lambda s: latent_step(s, 4, [1, 20], [150, 33]),
    "latent-sparse": lambda s: latent_step(s, 4, [1, 5], [150, 33], sparse=8),
    "linear": lambda s: linear_case(s, "none"),
    "linear-int8": lambda s: linear_case(s, "int8"),
    "linear-int4": lambda s: linear_case(s, "int4_group"),
    "linear-int8-wide": lambda s: linear_case(s, "int8", rows=65_600, columns=32),
    "norm": lambda s: norm_case(s, 0.0),
    "norm-gemma": lambda s: norm_case(s, 1.0),
    "prolog": prolog_case,
    "rope": lambda s: rope_case(s, interleaved=False),
    "rope-interleaved": lambda s: rope_case(s, interleaved=True),
    "route": route_case,
    "route-groups": lambda s: route_case(
        s, scoring="sigmoid", num_groups=4, top_k_groups=2, scaling=2.5, features=frozenset({"bias"})
    ),
    "route-plain-sigmoid": lambda s: route_case(s, scoring="sigmoid", renormalize=False),
}
"""By name; each raises where the device's answer is not the oracle's."""
