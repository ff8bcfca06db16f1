"""A call outside of its documented bounds raises a clear fault, each bound once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from core_conformance.subject import Subject

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 64, 128


def fused(**changes: Any) -> Any:
    """A correct call of paged attention, with changes."""
    from core_ascend.plan import causal_mask
    from core_ascend.vendor import npu

    call: dict[str, Any] = {
        "query": torch.randn(3, HEADS, DIM).bfloat16(),
        "key": torch.randn(4, SIZE, KV_HEADS * DIM).bfloat16(),
        "value": torch.randn(4, SIZE, KV_HEADS * DIM).bfloat16(),
        "input_layout": "TND",
        "num_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "scale": 0.1,
        "sparse_mode": 3,
        "atten_mask": causal_mask(torch.device("cpu")),
        "actual_seq_lengths": [1, 3],
        "actual_seq_lengths_kv": [5, 140],
        "block_table": torch.tensor([[1, 0], [2, 3]], dtype=torch.int32),
        "block_size": SIZE,
    }
    call |= changes
    operands = [call.pop(name) for name in ("query", "key", "value")]
    return npu().npu_fused_infer_attention_score(*operands, **call)


def half(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


BAD_ATTENTION: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "block-size": (
        lambda: {"block_size": 64, "key": half(4, 64, 128), "value": half(4, 64, 128)},
        "block size 64",
    ),
    "last-length-is-not-t": (lambda: {"actual_seq_lengths": [1, 2]}, "last cumulative length is 2, the query has 3"),
    "lengths-not-cumulative": (lambda: {"actual_seq_lengths": [2, 1]}, "cumulative"),
    "lists-differ": (lambda: {"actual_seq_lengths_kv": [5]}, "2 query lengths, 1 key lengths"),
    "no-lists": (lambda: {"actual_seq_lengths": None}, "lists on the host"),
    "float32": (
        lambda: {"query": torch.zeros(3, 4, 64), "key": torch.zeros(4, 128, 128), "value": torch.zeros(4, 128, 128)},
        "float32",
    ),
    "types-differ": (lambda: {"query": torch.zeros(3, 4, 64).half()}, "element types differ"),
    "not-contiguous": (lambda: {"query": half(4, 3, 64).transpose(0, 1)}, "query is not contiguous"),
    "mask-missing": (lambda: {"atten_mask": None}, "needs the mask"),
    "mask-of-another-size": (lambda: {"atten_mask": torch.zeros(256, 256, dtype=torch.int8)}, "not 2048"),
    "mask-without-triangle": (lambda: {"atten_mask": torch.zeros(2048, 2048, dtype=torch.int8)}, "above the diagonal"),
    "mask-where-none-belongs": (lambda: {"sparse_mode": 0}, "takes no mask"),
    "mode": (lambda: {"sparse_mode": 1}, "sparse_mode 1"),
    "head-dim": (
        lambda: {"query": half(3, 4, 72), "key": half(4, 128, 144), "value": half(4, 128, 144)},
        "heads of 72",
    ),
    "table-type": (lambda: {"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "int32"),
    "table-too-narrow": (lambda: {"block_table": torch.ones(2, 1, dtype=torch.int32)}, "too narrow"),
    "table-rows": (lambda: {"block_table": torch.ones(3, 2, dtype=torch.int32)}, "3 rows"),
    "table-names-no-block": (lambda: {"block_table": torch.full((2, 2), 9, dtype=torch.int32)}, "not there"),
    "fewer-keys-than-queries": (lambda: {"actual_seq_lengths_kv": [5, 1]}, "2 queries and 1 keys"),
    "layout": (lambda: {"input_layout": "BSND"}, "layout BSND"),
}


def test_the_call_that_the_bad_ones_come_from_is_good(subject: Subject) -> None:
    out, _ = fused()
    assert out.shape == (3, HEADS, DIM)


@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_attention_outside_its_bounds_faults(subject: Subject, case: str) -> None:
    from core_ascend.simulation.faults import NpuFault

    changes, words = BAD_ATTENTION[case]
    with pytest.raises(NpuFault, match=words):
        fused(**changes())


def scatter(slots: Tensor, tokens: int = 2, dtype: torch.dtype = torch.bfloat16) -> None:
    from core_ascend.vendor import npu

    x = torch.arange(tokens * 32.0).view(tokens, 1, 32)
    planes = [torch.zeros(3, SIZE, 1, 32, dtype=torch.bfloat16) for _ in range(2)]
    npu().npu_scatter_pa_kv_cache(
        key=x.to(dtype),
        value=x.to(dtype),
        key_cache=planes[0],
        value_cache=planes[1],
        slot_mapping=slots,
        cache_mode="Norm",
    )


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (torch.tensor([3, -1], dtype=torch.int32), "outside"),
        (torch.tensor([3, 3 * SIZE], dtype=torch.int32), "outside"),
        (torch.tensor([3.0, 4.0]), "slots are torch.float32"),
        (torch.tensor([3, 4], dtype=torch.int16), "slots are torch.int16"),
        (torch.tensor([3], dtype=torch.int32), "one slot a token"),
        (torch.tensor([3, 3], dtype=torch.int32), "two different tokens"),
    ],
)
def test_a_write_to_slots_that_are_none_faults(subject: Subject, slots: Tensor, words: str) -> None:
    from core_ascend.simulation.faults import NpuFault

    with pytest.raises(NpuFault, match=words):
        scatter(slots)


def test_a_write_of_another_type_than_the_cache_s_faults(subject: Subject) -> None:
    from core_ascend.simulation.faults import NpuFault

    with pytest.raises(NpuFault, match="element types differ"):
        scatter(torch.tensor([3, 4], dtype=torch.int32), dtype=torch.float16)


def other_calls() -> dict[str, tuple[Callable[[Any], Any], str]]:
    """Calls of other operators, each outside of one bound."""
    i8, f32 = torch.int8, torch.float32
    ids = torch.zeros(2, 2, dtype=torch.int32)
    return {
        "wide-int8-product": (
            lambda n: n.npu_quant_matmul(
                torch.zeros(1, 8, dtype=i8),
                torch.zeros(8, 65536, dtype=i8),
                torch.ones(65536),
                pertoken_scale=torch.ones(1),
                output_dtype=torch.bfloat16,
            ),
            "larger than 65535",
        ),
        "row-scales": (
            lambda n: n.npu_quant_matmul(
                torch.zeros(2, 8, dtype=i8),
                torch.zeros(8, 8, dtype=i8),
                torch.ones(8),
                pertoken_scale=torch.ones(3),
                output_dtype=torch.bfloat16,
            ),
            "row scales",
        ),
        "quantized-from-float32": (lambda n: n.npu_dynamic_quant(torch.zeros(2, 8)), "float32"),
        "norm-types": (lambda n: n.npu_rms_norm(half(2, 8), torch.ones(8)), "element types differ"),
        "rotation-heads": (
            lambda n: n.npu_rotary_mul(torch.zeros(1, 1, 1000, 2), torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)),
            "1000",
        ),
        "expert-ids": (
            lambda n: n.npu_moe_init_routing_v2(
                half(2, 8),
                ids - 1,
                active_num=4,
                expert_num=3,
                expert_tokens_num_type=1,
                expert_tokens_num_flag=True,
                active_expert_range=[0, 3],
            ),
            "outside",
        ),
        "groups": (
            lambda n: n.npu_grouped_matmul(
                [half(4, 8)],
                [half(2, 8, 8)],
                split_item=2,
                group_type=0,
                group_list_type=1,
                group_list=torch.tensor([3, 4]),
            ),
            "groups of",
        ),
        "group-list-type": (
            lambda n: n.npu_grouped_matmul(
                [half(4, 8)],
                [half(2, 8, 8)],
                split_item=2,
                group_type=0,
                group_list_type=1,
                group_list=torch.tensor([3, 1], dtype=torch.int32),
            ),
            "int64",
        ),
        "route-groups": (
            lambda n: n.npu_moe_gating_top_k(torch.zeros(2, 8), 2, group_count=4, k_group=2, norm_type=1),
            "4 groups of 2",
        ),
        "delta-types": (
            lambda n: n.npu_chunk_gated_delta_rule(
                half(2, 1, 128),
                half(2, 1, 128),
                half(2, 1, 128),
                beta=torch.zeros(2, 1),
                g=torch.zeros(2, 1),
                initial_state=half(1, 1, 128, 128),
                actual_seq_lengths=torch.tensor([2], dtype=torch.int32),
                scale=1.0,
            ),
            "beta is not bfloat16",
        ),
        "delta-steps": (
            lambda n: n.npu_recurrent_gated_delta_rule(
                half(9, 1, 128),
                half(9, 1, 128),
                half(9, 1, 128),
                half(9, 1, 128, 128),
                beta=half(9, 1),
                g=torch.zeros(9, 1, dtype=f32),
                scale=1.0,
                actual_seq_lengths=torch.tensor([9], dtype=torch.int32),
                ssm_state_indices=torch.arange(9, dtype=torch.int32),
                num_accepted_tokens=torch.ones(1, dtype=torch.int32),
            ),
            "9 tokens of a request, at most 8",
        ),
        "fractals-of-float32": (lambda n: n.npu_format_cast(torch.zeros(4, 4), 29), "no fractals of"),
    }


@pytest.mark.parametrize("case", other_calls())
def test_another_call_outside_its_bounds_faults(subject: Subject, case: str) -> None:
    from core_ascend.simulation.faults import NpuFault
    from core_ascend.vendor import npu

    call, words = other_calls()[case]
    with pytest.raises(NpuFault, match=words):
        call(npu())


def test_seventeen_latent_queries_of_a_request_fault_and_the_backend_never_sends_them(subject: Subject) -> None:
    from checks import latent_step

    from core_ascend import plan
    from core_ascend.simulation.faults import NpuFault

    honest, plan.MAX_PIECE = plan.MAX_PIECE, 17
    try:
        with pytest.raises(NpuFault, match="17 queries of a request, at most 16"):
            latent_step(subject, 2, [17], [17])
    finally:
        plan.MAX_PIECE = honest
