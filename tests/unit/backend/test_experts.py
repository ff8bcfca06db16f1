"""Routing and experts of the reference against Mixtral, Qwen3-MoE and DeepSeek-V3, and the way between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bare import bound
from paged import i32
from torch import Tensor
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from core.backend import Communicator, Packed, SingleRank
from core.backend import schemes as weight_schemes
from core.backend.ops import (
    CombineArgs,
    CombineOp,
    Determinism,
    DispatchArgs,
    DispatchOp,
    ExpertsArgs,
    ExpertsOp,
    RouteArgs,
    RouteOp,
)
from core.spec import DType

TOKENS, EXPERTS, TOP_K, HIDDEN, WIDTH = 9, 8, 3, 16, 12


# -- route -----------------------------------------------------------------------------------------------------------


def check_route(op: RouteOp, args: RouteArgs, weights: Tensor, ids: Tensor) -> None:
    got_weights, got_ids = bound(op)(args)
    assert got_weights.dtype == torch.float32 and got_ids.dtype == torch.int32
    order = ids.sort(-1).indices
    mine = got_ids.long().sort(-1).indices
    assert torch.equal(got_ids.long().gather(1, mine), ids.gather(1, order))
    torch.testing.assert_close(got_weights.gather(1, mine), weights.gather(1, order).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_route_equals_qwen3_moe(renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=renormalize, hidden_size=HIDDEN
    )
    router: Any = Qwen3MoeTopKRouter(config)  # type: ignore[no-untyped-call]
    router.weight.copy_(torch.randn(EXPERTS, HIDDEN))
    logits, weights, ids = router(torch.randn(TOKENS, HIDDEN))
    op = RouteOp(dtype=DType.FLOAT32, num_experts=EXPERTS, top_k=TOP_K, renormalize=renormalize)
    check_route(op, RouteArgs(router_logits=logits), weights, ids)


def test_route_equals_mixtral() -> None:
    config = MixtralConfig(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=HIDDEN)
    router: Any = MixtralTopKRouter(config)  # type: ignore[no-untyped-call]
    router.weight.copy_(torch.randn(EXPERTS, HIDDEN))
    x = torch.randn(TOKENS, HIDDEN)
    _, weights, ids = router(x)
    op = RouteOp(dtype=DType.FLOAT32, num_experts=EXPERTS, top_k=TOP_K)
    check_route(op, RouteArgs(router_logits=x @ router.weight.T), weights, ids)


@pytest.mark.parametrize("renormalize", [False, True])
def test_route_equals_deepseek_v3(renormalize: bool) -> None:
    config = DeepseekV3Config(
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        n_group=4,
        topk_group=2,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.copy_(torch.randn(EXPERTS, HIDDEN))
    router.e_score_correction_bias.copy_(torch.randn(EXPERTS))
    logits, weights, ids = router(torch.randn(40, HIDDEN))
    op = RouteOp(
        dtype=DType.FLOAT32,
        features=frozenset({"bias"}),
        num_experts=EXPERTS,
        top_k=TOP_K,
        scoring="sigmoid",
        renormalize=renormalize,
        num_groups=4,
        top_k_groups=2,
        scaling=2.5,
    )
    check_route(op, RouteArgs(router_logits=logits, bias=router.e_score_correction_bias), weights, ids)


def test_route_limits_groups_by_their_best_score_without_a_bias() -> None:
    logits = torch.tensor([[5.0, 0.0, 3.0, 3.1, 4.0, 0.1]])
    op = RouteOp(
        dtype=DType.FLOAT64, num_experts=6, top_k=2, num_groups=3, top_k_groups=2, renormalize=False, scoring="sigmoid"
    )
    weights, ids = bound(op)(RouteArgs(router_logits=logits))
    assert ids.tolist() == [[0, 4]]
    torch.testing.assert_close(weights, logits[:, [0, 4]].sigmoid())


def test_route_prefers_the_lower_expert_and_falls_in_score() -> None:
    op = RouteOp(dtype=DType.FLOAT32, num_experts=5, top_k=3)
    weights, ids = bound(op)(RouteArgs(router_logits=torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]])))
    assert ids.tolist() == [[1, 3, 0]]
    assert (weights[:, :-1] >= weights[:, 1:]).all() and weights.sum().item() == pytest.approx(1.0)


def test_route_of_hopeless_scores_is_finite() -> None:
    op = RouteOp(dtype=DType.FLOAT32, num_experts=4, top_k=2, scoring="sigmoid")
    weights, _ = bound(op)(RouteArgs(router_logits=torch.full((1, 4), -1e4)))
    assert weights.isfinite().all()


# -- experts ---------------------------------------------------------------------------------------------------------


def packed(weight: Tensor) -> Packed:
    return Packed(shape=weight.shape, scheme="none", tensors={"weight": weight})


def experts_op(**changes: Any) -> ExpertsOp:
    fields: dict[str, Any] = {
        "dtype": DType.FLOAT64,
        "num_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "top_k": TOP_K,
    }
    return ExpertsOp(**(fields | changes))


def routed() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    return x, torch.rand(TOKENS, TOP_K), ids.to(torch.int32)


@pytest.mark.parametrize("determinism", [Determinism.D0, Determinism.D2])
def test_experts_equal_qwen3_moe(determinism: Determinism) -> None:
    config = Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=WIDTH, hidden_size=HIDDEN, hidden_act="silu")
    module: Any = Qwen3MoeExperts(config).double()  # type: ignore[no-untyped-call]
    module.gate_up_proj.copy_(torch.randn_like(module.gate_up_proj))
    module.down_proj.copy_(torch.randn_like(module.down_proj))
    x, weights, ids = routed()
    args = ExpertsArgs(
        x=x, gate_up=packed(module.gate_up_proj), down=packed(module.down_proj), weights=weights, expert_ids=ids
    )
    out = bound(experts_op(determinism=determinism))(args)
    torch.testing.assert_close(out, module(x, ids.long(), weights.double()), rtol=1e-11, atol=1e-11)


def test_experts_of_other_ranks_count_as_zero_even_for_nan() -> None:
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.float64)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=torch.float64)
    x, weights, ids = routed()
    ids[4], x[4] = -1, float("nan")
    parts = []
    for first in (0, 4):
        rows = slice(first, first + 4)
        args = ExpertsArgs(x=x, gate_up=packed(gate_up[rows]), down=packed(down[rows]), weights=weights, expert_ids=ids)
        parts.append(bound(experts_op(num_experts=4, first_expert=first))(args))
    whole = ExpertsArgs(x=x, gate_up=packed(gate_up), down=packed(down), weights=weights, expert_ids=ids)
    expected = bound(experts_op())(whole)
    torch.testing.assert_close(parts[0] + parts[1], expected, rtol=1e-12, atol=1e-12)
    assert (expected[4] == 0).all()


QUANTIZERS = {
    "int8": weight_schemes.quantize_int8,
    "fp8_tensor": weight_schemes.quantize_fp8_tensor,
    "fp8_channel": weight_schemes.quantize_fp8_channel,
    "fp8_block": weight_schemes.quantize_fp8_block,
}


@pytest.mark.parametrize("scheme", sorted(QUANTIZERS))
def test_quantized_experts_are_their_dense_values(scheme: str) -> None:
    hidden, width = 130, 140
    dense = {
        "gate_up": torch.randn(EXPERTS, 2 * width, hidden) / 12,
        "down": torch.randn(EXPERTS, hidden, width) / 12,
    }
    weights: dict[str, Packed] = {}
    for name, value in dense.items():
        q, scale = QUANTIZERS[scheme](value)
        weights[name] = Packed(shape=value.shape, scheme=scheme, tensors={"weight": q, "scale": scale})
    x, route_weights, ids = torch.randn(TOKENS, hidden), *routed()[1:]
    op = experts_op(dtype=DType.FLOAT32, hidden_size=hidden, intermediate_size=width, scheme=scheme)
    out = bound(op)(ExpertsArgs(x=x, **weights, weights=route_weights, expert_ids=ids))
    plain = ExpertsArgs(
        x=x,
        gate_up=packed(weights["gate_up"].dense()),
        down=packed(weights["down"].dense()),
        weights=route_weights,
        expert_ids=ids,
    )
    expected = bound(experts_op(dtype=DType.FLOAT32, hidden_size=hidden, intermediate_size=width))(plain)
    limit = 0.03 if scheme == "int8" else 1e-5
    assert (out - expected).abs().max() <= limit * expected.abs().max()


class Transposed(Packed):
    """A backend's private form."""

    def dense(self) -> Tensor:
        return self.tensors()["private"].mT


@pytest.mark.parametrize("scheme", ["none", "int8"])
def test_experts_read_a_private_form_through_dense(scheme: str) -> None:
    x, weights, ids = routed()
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN).double(), torch.randn(EXPERTS, HIDDEN, WIDTH).double()
    private = {
        name: Transposed(shape=value.shape, scheme=scheme, tensors={"private": value.mT.contiguous()})
        for name, value in (("gate_up", gate_up), ("down", down))
    }
    out = bound(experts_op(scheme=scheme))(ExpertsArgs(x=x, **private, weights=weights, expert_ids=ids))
    public = ExpertsArgs(x=x, gate_up=packed(gate_up), down=packed(down), weights=weights, expert_ids=ids)
    expected = bound(experts_op())(public)
    assert (out - expected).abs().max() <= (0.03 if scheme == "int8" else 1e-12) * expected.abs().max()


def test_experts_take_quantized_activations() -> None:
    x, weights, ids = routed()
    act = weight_schemes.quantize_rows(x, "fp8_row")
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    args = ExpertsArgs(x=act, gate_up=packed(gate_up), down=packed(down), weights=weights, expert_ids=ids)
    plain = ExpertsArgs(
        x=act.q.double() * act.scale.double(),
        gate_up=packed(gate_up),
        down=packed(down),
        weights=weights,
        expert_ids=ids,
    )
    op = experts_op()
    torch.testing.assert_close(bound(op)(args), bound(op)(plain), rtol=1e-12, atol=1e-12)


# -- dispatch and combine --------------------------------------------------------------------------------------------


class Recorded(Communicator):
    """One of several ranks in one process: gathers from a table of what the others would send."""

    def __init__(self, rank: int, inputs: list[list[Tensor]]) -> None:
        self.rank, self.world, self._inputs, self._call = rank, len(inputs), inputs, 0

    def all_gather(self, x: Tensor) -> Tensor:
        parts = [x if rank == self.rank else inputs[self._call] for rank, inputs in enumerate(self._inputs)]
        self._call += 1
        return torch.cat(parts)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        others = [inputs[0] for rank, inputs in enumerate(self._inputs) if rank != self.rank]
        return sum(others, x).chunk(self.world)[self.rank]

    def all_reduce_(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_to_all_v(self, x: Tensor, send_counts: Any, recv_counts: Any) -> Tensor:
        raise NotImplementedError

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        raise NotImplementedError

    def send(self, x: Tensor, to: int) -> None:
        raise NotImplementedError

    def recv(self, x: Tensor, source: int) -> Tensor:
        raise NotImplementedError


def test_dispatch_pads_and_gathers_in_rank_order() -> None:
    other = [torch.full((4, 2), 7.0), torch.full((4, 1), 0.5), torch.full((4, 1), 3, dtype=torch.int32)]
    comm = Recorded(1, [other, []])
    args = DispatchArgs(x=torch.ones(3, 2), weights=torch.ones(3, 1), expert_ids=i32([[0], [1], [2]]), comm=comm)
    x, weights, ids = bound(DispatchOp(dtype=DType.FLOAT32, hidden_size=2, top_k=1, capacity=4, world=2))(args)
    assert x.shape == (8, 2) and weights.shape == (8, 1)
    assert ids[:, 0].tolist() == [3, 3, 3, 3, 0, 1, 2, -1]
    assert torch.equal(x[:4], other[0]) and (x[4:7] == 1).all()


def test_combine_sums_and_returns_own_tokens() -> None:
    mine, other = torch.randn(8, 2), torch.randn(8, 2)
    comm = Recorded(1, [[other], []])
    out = bound(CombineOp(dtype=DType.FLOAT32, hidden_size=2, capacity=4, world=2))(
        CombineArgs(x=mine, num_tokens=3, comm=comm)
    )
    torch.testing.assert_close(out, (mine + other)[4:7])


def test_one_rank_is_the_identity() -> None:
    x, comm = torch.randn(3, 2), SingleRank()
    args = DispatchArgs(x=x, weights=torch.ones(3, 1), expert_ids=i32([[0], [1], [2]]), comm=comm)
    y, _, ids = bound(DispatchOp(dtype=DType.FLOAT32, hidden_size=2, top_k=1, capacity=5))(args)
    assert ids[:, 0].tolist() == [0, 1, 2, -1, -1]
    op = CombineOp(dtype=DType.FLOAT32, hidden_size=2, capacity=5)
    assert torch.equal(bound(op)(CombineArgs(x=y, num_tokens=3, comm=comm)), x)
