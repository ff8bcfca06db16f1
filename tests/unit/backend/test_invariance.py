"""Class D2: a row's bits are the same whatever rows stand beside it. Sizes are odd, so that vector code has tails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bare import bound
from paged import i32
from torch import Tensor

from core.backend import Packed
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    Determinism,
    ExpertsArgs,
    ExpertsOp,
    LoraAddArgs,
    LoraAddOp,
    MergeLseArgs,
    MergeLseOp,
    RejectionSampleArgs,
    RejectionSampleOp,
    RmsNormArgs,
    RmsNormOp,
    RouteArgs,
    RouteOp,
    SampleArgs,
    SampleOp,
)
from core.spec import DType

ROWS = 11
COMMON: dict[str, Any] = {"dtype": DType.FLOAT32, "determinism": Determinism.D2}

Case = Callable[[], Callable[[slice], Tensor]]


def act_mul() -> Callable[[slice], Tensor]:
    x, run = torch.randn(ROWS, 2 * 37), bound(ActMulOp(**COMMON, size=37, activation="gelu_tanh"))
    return lambda rows: run(ActMulArgs(x=x[rows]))


def rms_norm() -> Callable[[slice], Tensor]:
    x, weight, run = torch.randn(ROWS, 3, 53), torch.randn(53), bound(RmsNormOp(**COMMON, dim=53, eps=1e-6))
    return lambda rows: run(RmsNormArgs(x=x[rows], weight=weight))


def route() -> Callable[[slice], Tensor]:
    logits, run = torch.randn(ROWS, 19), bound(RouteOp(**COMMON, num_experts=19, top_k=5))
    return lambda rows: torch.cat(run(RouteArgs(router_logits=logits[rows])), dim=1)


def experts() -> Callable[[slice], Tensor]:
    def pack(weight: Tensor) -> Packed:
        return Packed(shape=weight.shape, scheme="none", tensors={"weight": weight})

    gate_up, down = pack(torch.randn(3, 2 * 29, 23)), pack(torch.randn(3, 23, 29))
    x, weights, ids = torch.randn(ROWS, 23), torch.rand(ROWS, 2), torch.randint(0, 3, (ROWS, 2), dtype=torch.int32)
    run = bound(ExpertsOp(**COMMON, num_experts=3, hidden_size=23, intermediate_size=29, top_k=2))
    return lambda rows: run(
        ExpertsArgs(x=x[rows], gate_up=gate_up, down=down, weights=weights[rows], expert_ids=ids[rows])
    )


def lora() -> Callable[[slice], Tensor]:
    x, y, a, b = torch.randn(ROWS, 31), torch.randn(ROWS, 17), torch.randn(2, 3, 31), torch.randn(2, 17, 3)
    ids = torch.randint(0, 2, (ROWS,), dtype=torch.int32)
    run = bound(LoraAddOp(**COMMON, in_features=31, out_features=17, rank=3, num_adapters=2))

    def add(rows: slice) -> Tensor:
        out = y[rows].clone()
        run(LoraAddArgs(y=out, x=x[rows], a=a, b=b, adapter_ids=ids[rows]))
        return out

    return add


def merge_lse() -> Callable[[slice], Tensor]:
    outs, lses = torch.randn(3, ROWS, 5, 7), torch.randn(3, ROWS, 5)
    run = bound(MergeLseOp(**COMMON, num_heads=5, v_head_dim=7))

    def merge(rows: slice) -> Tensor:
        out, lse = run(MergeLseArgs(outs=outs[:, rows], lses=lses[:, rows]))
        return torch.cat((out, lse[..., None]), dim=-1)

    return merge


def sample() -> Callable[[slice], Tensor]:
    logits = torch.randn(ROWS, 101)
    op = SampleOp(**COMMON, vocab_size=101, features=frozenset({"top_p"}))
    run, top_p = bound(op), torch.full((ROWS,), 0.9)
    return lambda rows: run(
        SampleArgs(
            logits=logits[rows],
            temperature=torch.ones(ROWS)[rows],
            seeds=torch.arange(ROWS)[rows],
            positions=i32(list(range(ROWS)))[rows],
            top_p=top_p[rows],
        )
    )


def rejection_sample() -> Callable[[slice], Tensor]:
    logits, drafts = torch.randn(ROWS, 3, 33), torch.randint(0, 33, (ROWS, 2), dtype=torch.int32)
    run = bound(RejectionSampleOp(**COMMON, vocab_size=33, num_spec_tokens=2))
    return lambda rows: torch.cat(
        [
            part.view(-1, width)
            for part, width in zip(
                run(
                    RejectionSampleArgs(
                        logits=logits[rows],
                        draft_token_ids=drafts[rows],
                        num_draft_tokens=i32([2] * ROWS)[rows],
                        temperature=torch.full((ROWS,), 5.0)[rows],
                        seeds=torch.arange(ROWS)[rows],
                        positions=i32([4] * ROWS)[rows],
                    )
                ),
                (3, 1),
                strict=True,
            )
        ],
        dim=1,
    )


CASES: list[Case] = [act_mul, rms_norm, route, experts, lora, merge_lse, sample, rejection_sample]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_rows_do_not_show_in_each_other(case: Case) -> None:
    run = case()
    whole = run(slice(0, ROWS))
    for cut in ((0, 1), (1, 3), (2, 7), (7, ROWS)):
        assert torch.equal(run(slice(*cut)), whole[slice(*cut)]), cut
