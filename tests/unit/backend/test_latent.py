"""`mla_prolog`, `mla`, `index_topk` and `merge_lse` of the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from bare import bound
from paged import PagedStep, i32, kv_spec, make_plan
from torch import Tensor

from core.backend import Packed
from core.backend.ops import (
    AttentionArgs,
    AttentionOp,
    Determinism,
    IndexTopkArgs,
    IndexTopkOp,
    MergeLseArgs,
    MergeLseOp,
    MlaArgs,
    MlaOp,
    MlaPrologArgs,
    MlaPrologOp,
)
from core.spec import DType

HEADS, NOPE, LATENT, ROPE, V_DIM = 3, 6, 10, 4, 5
MIXED = ([1, 3, 5], [9, 7, 5])


def mla_op(*features: str, determinism: Determinism = Determinism.D0) -> MlaOp:
    return MlaOp(
        dtype=DType.FLOAT64,
        features=frozenset(features),
        determinism=determinism,
        num_heads=HEADS,
        latent_dim=LATENT,
        rope_dim=ROPE,
        kv_dtype=DType.FLOAT64,
        scale=0.3,
    )


def filled(padding: int = 0) -> tuple[PagedStep, list[Tensor]]:
    step = PagedStep(*MIXED, kv_spec(1, LATENT + ROPE, 0), padding=padding)
    rows = [torch.randn(n, 1, LATENT + ROPE, dtype=torch.float64) for n in step.seq_lens]
    for row, values in enumerate(rows):
        step.store(0, row, values)
    return step, [values[:, 0] for values in rows]


def brute(query: Tensor, keys: Tensor, seen: list[int]) -> tuple[Tensor, float]:
    """One head of one query [LATENT + ROPE] over the positions that it sees."""
    logits = np.array([0.3 * float(query @ keys[s]) for s in seen])
    weights = np.exp(logits)
    mixed = sum((w * keys[s, :LATENT] for w, s in zip(weights, seen, strict=True)), torch.zeros(LATENT).double())
    return mixed / weights.sum(), float(np.log(weights.sum()))


@pytest.mark.parametrize("determinism", [Determinism.D0, Determinism.D3])
@pytest.mark.parametrize("sparse", [False, True])
def test_mla_equals_loops(sparse: bool, determinism: Determinism) -> None:
    step, keys = filled(padding=1)
    total = step.num_tokens
    q_latent = torch.randn(total, HEADS, LATENT, dtype=torch.float64)
    q_rope = torch.randn(total, HEADS, ROPE, dtype=torch.float64)
    lse = torch.zeros(total, HEADS, dtype=torch.float64)
    indices, seen = torch.full((total, 4), -1, dtype=torch.int32), []
    for row, (start, end) in enumerate(step.spans()):
        for i in range(end - start):
            position = step.seq_lens[row] - (end - start) + i
            chosen = torch.randperm(position + 1)[:4].tolist() if sparse else list(range(position + 1))
            seen.append(chosen)
            indices[start + i, : len(chosen[:4])] = i32(chosen[:4])
    features = ("lse", "sparse") if sparse else ("lse",)
    args = MlaArgs(
        q_latent=q_latent,
        q_rope=q_rope,
        cache=step.cache,
        plan=step.plan,
        indices=indices if sparse else None,
        lse=lse,
    )
    out = bound(mla_op(*features, determinism=determinism))(args)
    assert out.isfinite().all()
    for row, (start, end) in enumerate(step.spans()):
        for t in range(start, end):
            for h in range(HEADS):
                query = torch.cat((q_latent[t, h], q_rope[t, h]))
                expected, expected_lse = brute(query, keys[row], seen[t])
                torch.testing.assert_close(out[t, h], expected, rtol=1e-11, atol=1e-12)
                assert lse[t, h].item() == pytest.approx(expected_lse, abs=1e-11)


def deepseek() -> Any:
    """One attention layer of DeepSeek-V3 in float64, with random weights."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config: Any = DeepseekV3Config
    config = config(
        hidden_size=24,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V_DIM,
        rope_interleave=True,
        attn_implementation="sdpa",
    )
    module = DeepseekV3Attention(config, 0).double().eval()
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module


def test_prolog_and_mla_equal_deepseek_v3() -> None:
    module, n = deepseek(), 7
    x = torch.randn(n, 24, dtype=torch.float64)
    rates = 10.0 ** (-torch.arange(0, ROPE, 2).double() / ROPE)
    turns = torch.arange(n).double()[:, None] * rates
    table = torch.cat((turns.cos(), turns.sin()), -1).float()
    cos, sin = (torch.cat((part, part), -1).double()[None] for part in table.chunk(2, -1))
    expected, _ = module(x[None], (cos, sin), torch.full((n, n), -torch.inf).double().triu(1)[None, None])

    up = module.kv_b_proj.weight.view(HEADS, NOPE + V_DIM, LATENT)
    k_up, v_up = up[:, :NOPE].transpose(1, 2).contiguous(), up[:, NOPE:]
    step = PagedStep([n], [n], kv_spec(1, LATENT + ROPE, 0))
    prolog = MlaPrologOp(
        dtype=DType.FLOAT64,
        num_heads=HEADS,
        nope_dim=NOPE,
        latent_dim=LATENT,
        rope_dim=ROPE,
        kv_dtype=DType.FLOAT64,
        eps=module.kv_a_layernorm.variance_epsilon,
    )
    for determinism in (Determinism.D0, Determinism.D2):
        op = dataclasses.replace(prolog, determinism=determinism)
        q_latent, q_rope = bound(op)(
            MlaPrologArgs(
                q=module.q_proj(x).view(n, HEADS, NOPE + ROPE),
                kv=module.kv_a_proj_with_mqa(x),
                kv_weight=module.kv_a_layernorm.weight,
                k_up=Packed(shape=k_up.shape, scheme="none", tensors={"weight": k_up}),
                positions=step.plan.batch.positions,
                cos_sin=table,
                cache=step.cache,
                plan=step.plan,
            )
        )
        mla = MlaOp(
            dtype=DType.FLOAT64,
            num_heads=HEADS,
            latent_dim=LATENT,
            rope_dim=ROPE,
            kv_dtype=DType.FLOAT64,
            scale=module.scaling,
        )
        latent = bound(mla)(MlaArgs(q_latent=q_latent, q_rope=q_rope, cache=step.cache, plan=step.plan))
        heads = torch.einsum("thl,hvl->thv", latent, v_up).flatten(1)
        # transformers norms the latent and takes the softmax in float32.
        torch.testing.assert_close(module.o_proj(heads), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("determinism", [Determinism.D0, Determinism.D3])
@pytest.mark.parametrize("top_k", [2, 4, 20])
def test_index_topk_equals_sorting_by_hand(top_k: int, determinism: Determinism) -> None:
    dim = 6
    step = PagedStep(*MIXED, kv_spec(1, dim, 0), padding=2)
    keys = [torch.randn(n, 1, dim, dtype=torch.float64) for n in step.seq_lens]
    for row, values in enumerate(keys):
        step.store(0, row, values)
    query = torch.randn(step.num_tokens, HEADS, dim, dtype=torch.float64)
    weights = torch.randn(step.num_tokens, HEADS)
    op = IndexTopkOp(
        dtype=DType.FLOAT64,
        determinism=determinism,
        num_heads=HEADS,
        head_dim=dim,
        top_k=top_k,
        kv_dtype=DType.FLOAT64,
    )
    out = bound(op)(IndexTopkArgs(query=query, weights=weights, cache=step.cache, plan=step.plan))
    assert out.dtype == torch.int32 and out.shape == (step.num_tokens, top_k)
    for row, (start, end) in enumerate(step.spans()):
        for t in range(start, end):
            position = step.seq_lens[row] - (end - t)
            scores = [
                sum(float(weights[t, h]) * max(0.0, float(query[t, h] @ keys[row][s, 0])) for h in range(HEADS))
                for s in range(position + 1)
            ]
            expected = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:top_k]
            assert out[t].tolist() == expected + [-1] * (top_k - len(expected))
    assert (out[step.spans()[-1][1] :] == -1).all()


def test_index_topk_prefers_the_lower_position() -> None:
    step = PagedStep([1], [6], kv_spec(1, 2, 0))
    step.store(0, 0, torch.tensor([[1, 0], [2, 0], [1, 0], [2, 0], [0, 1], [0, 1]]).double()[:, None])
    op = IndexTopkOp(dtype=DType.FLOAT64, num_heads=1, head_dim=2, top_k=5, kv_dtype=DType.FLOAT64)
    query = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    args = IndexTopkArgs(query=query, weights=torch.ones(1, 1), cache=step.cache, plan=step.plan)
    assert bound(op)(args).tolist() == [[1, 3, 0, 2, 4]]


# -- merge_lse -------------------------------------------------------------------------------------------------------


def test_merging_halves_is_attention_over_all_keys() -> None:
    op = AttentionOp(
        dtype=DType.FLOAT64,
        features=frozenset({"ragged", "lse"}),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=5,
        kv_dtype=DType.FLOAT64,
        scale=0.4,
        causal=False,
    )
    query, key = torch.randn(6, 4, 8).double(), torch.randn(6, 2, 8).double()
    value = torch.randn(6, 2, 5).double()

    def attend(keys: slice) -> tuple[Tensor, Tensor]:
        # A ragged step has as many queries as keys, so the six queries come in groups of the part's size.
        n = keys.stop - keys.start
        lse = torch.zeros(n, 4, dtype=torch.float64)
        outs, lses = [], []
        for first in range(0, 6, n):
            args = AttentionArgs(
                query=query[first : first + n],
                cache=None,
                plan=make_plan([n], [n]),
                key=key[keys],
                value=value[keys],
                lse=lse,
            )
            outs.append(bound(op)(args))
            lses.append(lse.clone())
        return torch.cat(outs), torch.cat(lses)

    parts = [attend(slice(0, 2)), attend(slice(2, 4)), attend(slice(4, 6))]
    args = MergeLseArgs(outs=torch.stack([out for out, _ in parts]), lses=torch.stack([lse for _, lse in parts]))
    merged, lse = bound(MergeLseOp(dtype=DType.FLOAT64, num_heads=4, v_head_dim=5))(args)
    whole, whole_lse = attend(slice(0, 6))
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_a_part_without_keys_may_hold_anything() -> None:
    outs, lses = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1)
    outs[0, 0], lses[0, 0] = float("nan"), -torch.inf
    outs[:, 1], lses[:, 1] = float("nan"), -torch.inf
    merged, lse = bound(MergeLseOp(dtype=DType.FLOAT32, num_heads=1, v_head_dim=4))(MergeLseArgs(outs=outs, lses=lses))
    torch.testing.assert_close(merged[0], outs[1, 0])
    torch.testing.assert_close(lse[0], lses[1, 0])
    assert (merged[1] == 0).all() and lse[1, 0] == -torch.inf
