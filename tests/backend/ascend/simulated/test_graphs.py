"""Captured steps: host lists come anew with every replay, and a replay without them is a fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from core.backend.ops import AttentionArgs, AttentionOp
from core.spec import DType
from core_conformance.operations.paged import PagedStep
from core_conformance.subject import Subject, wide_op

OP = AttentionOp(
    dtype=DType.BFLOAT16, num_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, kv_dtype=DType.BFLOAT16, scale=0.125
)


def recorded(subject: Subject) -> tuple[PagedStep, Any, Any, Any]:
    """A captured decode step of two requests, the shorter one first."""
    step = PagedStep(subject, OP, [1, 1], [131, 260])
    cache, query = step.filled_cache(), step.device_query()
    short = PagedStep(subject, OP, [1, 1], [130, 259])
    short.tables, short.keys, short.values = step.tables, step.keys, step.values
    plan = short.plan()
    attend = subject.backend.bind(OP)
    graph = subject.backend.capture(lambda: attend(AttentionArgs(query=query, cache=cache, plan=plan)), [plan])
    return step, plan, graph, query


def refreshed(subject: Subject, step: PagedStep, plan: Any) -> None:
    """The plan, in its own memory, of the step."""
    batch = step.batch(on_device=True)
    group = batch.groups[0]
    known = plan.batch.groups[0]
    for name in ("block_table", "slots", "seq_lens"):
        getattr(known, name).copy_(getattr(group, name))
    lists = dataclasses.replace(known, seq_lens_host=group.seq_lens_host)
    subject.backend.plan(dataclasses.replace(plan.batch, groups=(lists,)), plan.spec, into=plan)


def test_a_replay_takes_the_lengths_of_the_plan_and_not_those_of_the_capture(subject: Subject) -> None:
    step, plan, graph, _ = recorded(subject)
    refreshed(subject, step, plan)
    got = graph.replay([plan])
    exact = step.exact(wide_op(OP))
    assert float((got.double() - exact).abs().max()) < 0.02


def test_a_replay_without_new_lists_is_a_fault(subject: Subject) -> None:
    from core_ascend.simulation.faults import NpuFault

    _, _, graph, _ = recorded(subject)
    with pytest.raises(NpuFault, match="replayed without new host lists"):
        graph._recording.replay()


def test_what_a_capture_computes_is_not_there_before_a_replay(subject: Subject) -> None:
    _, plan, graph, query = recorded(subject)
    assert not bool(graph._result.isfinite().any())
    query.copy_(torch.zeros_like(query))
    assert bool(graph.replay([plan]).isfinite().all())


def test_a_step_that_reads_the_device_on_the_host_cannot_be_captured(subject: Subject) -> None:
    from core_ascend.simulation.faults import NpuFault

    x = torch.ones(3)
    with pytest.raises(NpuFault, match="the host reads the device"):
        subject.backend.capture(lambda: x.sum().item(), [])


def test_the_names_that_a_graph_updates_are_arguments_of_the_calls(subject: Subject) -> None:
    import core_ascend.ops.attention as attention
    import core_ascend.ops.latent as latent
    from core_ascend import launches

    step = PagedStep(subject, OP, [1, 1], [131, 260])
    with launches.recorded() as calls:
        step.run()
    [lists] = [call() for call in calls]
    schema = torch.ops.npu.npu_fused_infer_attention_score.default._schema
    assert set(lists) <= {argument.name for argument in schema.arguments}
    assert lists["actual_seq_lengths"] == [1, 2] and lists["actual_seq_lengths_kv"] == [131, 260]
    assert attention.note is latent.note is launches.note
