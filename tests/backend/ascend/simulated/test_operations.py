"""Operations at the sizes that the calls are made for, against the suite's own arithmetic and the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import CHECKS, attention_step, delta_step, experts_case, latent_step, prolog_case

from core.backend.ops import ExportBlocksArgs, ExportBlocksOp, ImportBlocksArgs, ImportBlocksOp, MlaOp
from core.spec import DType
from core_conformance.subject import Subject


@pytest.mark.parametrize("name", CHECKS)
def test_an_operation_agrees_with_the_oracle(subject: Subject, name: str) -> None:
    CHECKS[name](subject)


@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("lengths", [([1, 1, 1], [1, 128, 300]), ([1, 2, 40], [5, 129, 40]), ([50], [190])])
def test_latent_attention_of_decodes_prompts_and_chunks(subject: Subject, heads: int, lengths: Any) -> None:
    latent_step(subject, heads, *lengths)


def test_latent_attention_with_padding_behind_it(subject: Subject) -> None:
    latent_step(subject, 4, [1, 1], [7, 140], padding=2)


@pytest.mark.parametrize("checkpoint", [-1, 9])
def test_a_long_prompt_and_decodes_with_drafts_share_a_step_of_the_delta_rule(
    subject: Subject, checkpoint: int
) -> None:
    delta_step(subject, drafts=2, checkpoint=checkpoint)


def test_latent_blocks_leave_and_return_in_the_canonical_form(subject: Subject) -> None:
    layout = subject.backend.kv_layout(latent_step(subject, 2, [1], [3]).spec, 128)
    assert [plane.block_shape for plane in layout.planes] == [(128, 1, 512), (128, 1, 64)]
    cache = tuple(torch.randn(5, *plane.block_shape).bfloat16() for plane in layout.planes)
    ids = torch.tensor([4, 1], dtype=torch.int32)
    [tokens] = subject.backend.bind(ExportBlocksOp(dtype=DType.BFLOAT16, layout=layout))(
        ExportBlocksArgs(cache=cache, block_ids=ids)
    )
    assert torch.equal(tokens[:128], torch.cat([plane[4] for plane in cache], -1))
    other = tuple(torch.zeros_like(plane) for plane in cache)
    subject.backend.bind(ImportBlocksOp(dtype=DType.BFLOAT16, layout=layout))(
        ImportBlocksArgs(cache=other, block_ids=ids, planes=(tokens,))
    )
    for a, b in zip(cache, other, strict=True):
        assert torch.equal(a[ids.long()], b[ids.long()])
        assert not b[0].any()


def test_a_latent_cache_of_another_width_stays_canonical(subject: Subject) -> None:
    op = MlaOp(dtype=DType.BFLOAT16, num_heads=2, latent_dim=64, rope_dim=16, kv_dtype=DType.BFLOAT16, scale=0.1)
    assert subject.backend.supports(op, subject.target.device).kind == "COMPOSITE"


def test_int8_experts_and_dense_ones_leave_other_ranks_alone(subject: Subject) -> None:
    for scheme in ("none", "int8"):
        experts_case(subject, scheme, first_expert=2)


def test_the_prolog_stores_what_its_parts_store(subject: Subject) -> None:
    prolog_case(subject)


def test_sinks_and_windows_of_attention(subject: Subject) -> None:
    attention_step(subject, features=frozenset({"sinks"}))
    attention_step(subject, window=40)
