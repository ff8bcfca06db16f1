"""Kernels over caches in the interpreter, against the reference; faults planted in their source must show."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import with_fault
from steps import PAGE, bound, draw, int32, make_plan, reference
from torch import Tensor

from core.backend.ops import (
    AttentionArgs,
    AttentionOp,
    Conv1dArgs,
    Conv1dOp,
    Determinism,
    GatedDeltaArgs,
    GatedDeltaOp,
    IndexTopkArgs,
    IndexTopkOp,
    MlaArgs,
    MlaOp,
)
from core.spec import DType
from core_triton import registry
from core_triton.target import TARGETS

QUERY, KEYS = (1, 1, 5, 18), (3, 35, 20, 18)
BLOCKS = 1 + sum(-(-keys // PAGE) for keys in KEYS)
F32 = DType.FLOAT32


def attention(dtype: DType = F32, **changes: Any) -> AttentionOp:
    fields: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "v_head_dim": 32, "scale": 0.2}
    return AttentionOp(dtype=dtype, **({"kv_dtype": dtype} | fields | changes))


def attention_args(dtype: torch.dtype = torch.float32) -> AttentionArgs:
    planes = [draw(BLOCKS, PAGE, 2, 32, seed=seed).to(dtype) for seed in (1, 2)]
    for plane in planes:
        plane[0] = float("nan")
    query = draw(sum(QUERY), 6, 32).to(dtype)
    return AttentionArgs(query=query, cache=(planes[0], planes[1]), plan=make_plan(QUERY, KEYS))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_attention_of_a_mixed_batch_is_the_references(arch: str) -> None:
    op = attention(window=9, softcap=3.0)
    torch.testing.assert_close(bound(op, arch)(attention_args()), reference(op)(attention_args()), atol=2e-6, rtol=2e-5)


FAULTS = {
    "dropped rescale": ("summed = summed * rescale[:, None] + tl.dot", "summed = summed + tl.dot"),
    "off-by-one mask": ("keys[None, :] <= position[:, None]", "keys[None, :] < position[:, None]"),
    "wrong head map": ("head = kv_head * GROUP + rows % GROUP", "head = kv_head + rows % GROUP * tl.num_programs(1)"),
    "null block read": ("inside = inside & (block != 0)", "inside = inside & (block >= 0)"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_fault_in_attention_shows(arch: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = attention_args()
    if fault == "null block read":
        args.plan.group.block_table[1, 0] = 0
    op = attention()
    attend, expected = bound(op, arch), reference(op)(args)
    torch.testing.assert_close(attend(args), expected, atol=2e-6, rtol=2e-5)
    module = importlib.import_module("core_triton.kernels.attention")
    planted = with_fault(module, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(module, "attention_kernel", planted.attention_kernel)
    assert not torch.allclose(attend(args), expected, atol=1e-2)


def test_a_token_has_the_same_bits_however_its_prompt_is_cut() -> None:
    op = attention(determinism=Determinism.D3)
    attend, args = bound(op), attention_args()
    whole = attend(args)[-18:]
    keys = [plane[-2:] for plane in args.cache or ()]
    cache = tuple(torch.cat((plane[:1], part)) for plane, part in zip(args.cache or (), keys, strict=True))
    pieces: list[Tensor] = []
    for first, last in ((0, 5), (5, 6), (6, 18)):
        plan = make_plan([last - first], [last])
        query = args.query[-18:][first:last]
        pieces.append(attend(AttentionArgs(query=query, cache=cache, plan=plan)))
    assert torch.equal(torch.cat(pieces), whole)


def test_attention_cut_into_parts_is_attention() -> None:
    op = attention(features=frozenset({"sinks", "lse"}))
    args, sinks = attention_args(), draw(6)
    args.plan = make_plan((1,), (60,))
    args.query, args.sinks = args.query[:1], sinks
    outs = []
    for run in (bound(op), reference(op)):
        args.lse = torch.full((1, 6), float("nan"))
        outs.append((run(args), args.lse))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_latent_attention_is_the_references(sparse: bool) -> None:
    features = frozenset({"sparse"} if sparse else ())
    op = MlaOp(dtype=F32, num_heads=3, latent_dim=32, rope_dim=16, kv_dtype=F32, scale=0.2, features=features)
    plane, plan = draw(BLOCKS, PAGE, 1, 48), make_plan(QUERY, KEYS)
    plane[0] = float("nan")
    indices = torch.stack([torch.randperm(18)[:4].to(torch.int32) for _ in range(sum(QUERY))]) if sparse else None
    queries = [draw(sum(QUERY), 3, dim) for dim in (32, 16)]
    args = MlaArgs(q_latent=queries[0], q_rope=queries[1], cache=(plane,), plan=plan, indices=indices)
    torch.testing.assert_close(bound(op)(args), reference(op)(args), atol=2e-6, rtol=2e-5)


def test_index_topk_orders_by_score_and_then_by_position() -> None:
    op = IndexTopkOp(dtype=F32, num_heads=3, head_dim=16, top_k=20, kv_dtype=F32)
    plane = draw(BLOCKS, PAGE, 1, 16).round()
    query, weights = draw(sum(QUERY), 3, 16).round(), draw(sum(QUERY), 3).round()
    args = IndexTopkArgs(query=query, weights=weights, cache=(plane,), plan=make_plan(QUERY, KEYS))
    assert torch.equal(bound(op)(args), reference(op)(args))


def _states() -> dict[str, Tensor]:
    slots = int32([[2, 3], [4, 5], [6, 7], [8, 9]])
    return {
        "state_slots": slots,
        "num_accepted": int32([1, 2, 1, 0]),
        "checkpoint_slots": int32([-1, 10, 11, 12]),
    }


def test_convolutions_keep_the_references_states() -> None:
    op = Conv1dOp(dtype=F32, channels=20, width=4)
    results = []
    for run in (bound(op), reference(op)):
        plane = draw(13, 3, 20)
        args = Conv1dArgs(
            x=draw(25, 20), weight=draw(20, 4), cache=(plane,), plan=make_plan(QUERY, KEYS, **_states())
        )  # fmt: skip
        results.append((run(args), plane))
    torch.testing.assert_close(results[0], results[1], atol=1e-6, rtol=1e-5)


def _delta_args(plane: Tensor) -> GatedDeltaArgs:
    return GatedDeltaArgs(
        query=draw(25, 1, plane.shape[2]),
        key=draw(25, 1, plane.shape[2], seed=1),
        value=draw(25, 2, 16),
        gate=-draw(25, 2).abs(),
        beta=torch.sigmoid(draw(25, 2)),
        cache=(plane,),
        plan=make_plan(QUERY, KEYS, **_states()),
    )


DELTA = GatedDeltaOp(dtype=F32, num_k_heads=1, num_v_heads=2, k_dim=16, v_dim=16, scale=0.25)


@pytest.mark.parametrize("k_dim", [16, 40], ids=["one piece of the key", "three pieces"])
def test_the_delta_rule_by_token_and_by_chunk_is_the_references(k_dim: int) -> None:
    op, results = dataclasses.replace(DELTA, k_dim=k_dim), []
    for run in (bound(op), reference(op)):
        plane = draw(13, 2, k_dim, 16)
        results.append((run(_delta_args(plane)), plane))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("known = tl.sum(factors[:, None] * updates, 0)", "known = tl.sum(factors[:, None] * v, 0)"),
        ("state = state * tl.exp(whole) + added", "state = state + added"),
    ],
    ids=["unsolved", "no decay"],
)
def test_a_fault_in_the_chunks_shows(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, expected = draw(13, 2, 16, 16), draw(13, 2, 16, 16)
    out = reference(DELTA)(_delta_args(expected))
    run, module = bound(DELTA), importlib.import_module("core_triton.kernels.gated_delta")
    planted = with_fault(module, old, new, tmp_path)
    monkeypatch.setattr(module, "gated_delta_chunk_kernel", planted.gated_delta_chunk_kernel)
    same = torch.allclose(run(_delta_args(kept)), out, atol=1e-2)
    assert not same or not torch.allclose(kept, expected, atol=1e-2)


def test_what_a_chip_cannot_do_is_refused_with_the_reason() -> None:
    cached = attention(DType.BFLOAT16, kv_dtype=DType.FLOAT8_E4M3FN)
    assert registry.verdict(cached, TARGETS["sm_80"]).reason == "sm_80 has no float8_e4m3fn"
    assert registry.verdict(cached, TARGETS["sm_90"]).kind == "NATIVE"
    wide = attention(head_dim=512, v_head_dim=512)
    assert "heads of more than 256" in registry.verdict(wide, TARGETS["sm_90"]).reason
