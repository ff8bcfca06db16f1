"""L1: recurrent layers where the answer is known in closed form, exactly, in every type."""

from __future__ import annotations

import torch
from torch import Tensor

from core.spec import DType
from core_conformance.checks import check
from core_conformance.diagnosis import known
from core_conformance.operations.recurrent import Inputs, Lane, Layer, StateStep
from core_conformance.operations.recurrent_layers import conv1d, gated_delta, ssd
from core_conformance.subject import Subject
from core_conformance.suite.test_l1_dense import DTYPES


def _run(subject: Subject, layer: Layer, inputs: Inputs, count: int) -> Tensor:
    """Outputs of one prompt from zero."""
    subject.bind(layer.op)
    step = StateStep(subject, layer, [Lane(tokens=count, slots=(3,), accepted=0)])
    kinds = {name: x.dtype for name, x in step.inputs.items()}
    step.inputs = {name: x.to(kinds[name]) for name, x in inputs.items()}
    return step.run(step.plane("nan"))


@check("L1/conv1d/impulse", DTYPES)
def test_an_impulse_shows_the_taps(subject: Subject, variant: DType) -> None:
    """A single 1: the taps come out one after the other, the last tap first, and then nothing more."""
    layer = conv1d(variant, bias=False, activation="none")
    channels, width = layer.op.channels, layer.op.width  # type: ignore[attr-defined]
    weight = torch.arange(1.0, channels * width + 1).view(channels, width)
    x = torch.zeros(width + 3, channels)
    x[1] = 1.0
    exact = torch.zeros(width + 3, channels)
    exact[1 : 1 + width] = weight.flip(1).T
    forward = torch.zeros_like(exact)
    forward[1 : 1 + width] = weight.T
    suspects = known({"order: the taps are applied from the other end": forward.double()})
    out = _run(subject, layer, {"x": x, "weight": weight}, width + 3)
    subject.agree(layer.op, out, exact.double(), 0.0, "(impulse) result", suspects=suspects)


@check("L1/gated_delta/memory", DTYPES)
def test_a_key_gives_back_its_value(subject: Subject, variant: DType) -> None:
    """One-hot keys, no decay, beta 1: each token stores a value and asks for an older one; a key stored twice has the
    newer value; beta 0 stores nothing.
    """
    layer = gated_delta(variant, qk_l2norm=False, scale=0.5)
    op = layer.op
    stored, asked, beta = [0, 1, 2, 0, 1], [0, 0, 1, 0, 1], [1.0, 1.0, 1.0, 1.0, 0.0]
    values = torch.arange(1.0, 6.0)[:, None, None].expand(5, op.num_v_heads, op.v_dim)  # type: ignore[attr-defined]
    heads = (5, op.num_k_heads, op.k_dim)  # type: ignore[attr-defined]
    inputs = {
        "query": torch.eye(heads[2])[asked][:, None].expand(heads),
        "key": torch.eye(heads[2])[stored][:, None].expand(heads),
        "value": values,
        "gate": torch.zeros(5, op.num_v_heads),  # type: ignore[attr-defined]
        "beta": torch.tensor(beta)[:, None].expand(5, op.num_v_heads),  # type: ignore[attr-defined]
    }

    def answers(numbers: list[float]) -> Tensor:
        return 0.5 * torch.tensor(numbers, dtype=torch.float64)[:, None, None].expand(values.shape)

    suspects = known(
        {
            "delta: the value is added to what the key held": answers([1, 1, 2, 5, 2]),
            "order: a token asks before it has stored": answers([0, 1, 2, 1, 2]),
            "beta: it does not count": answers([1, 1, 2, 4, 5]),
            "scale: it is left out": 2 * answers([1, 1, 2, 4, 2]),
        }
    )
    out = _run(subject, layer, inputs, 5)
    subject.agree(op, out, answers([1, 1, 2, 4, 2]), 0.0, "(stored values) result", suspects=suspects)


@check("L1/ssd/counting", DTYPES)
def test_the_state_counts_tokens(subject: Subject, variant: DType) -> None:
    """Step sizes clamped to 1, no decay, one-hot b: c reads how often each token name came by; d adds x itself."""
    layer = ssd(variant, dt_min=1.0, dt_max=1.0)
    op, count = layer.op, 9
    names = torch.arange(count) % 4
    groups, width = op.num_groups, op.state_dim  # type: ignore[attr-defined]
    inputs = {
        "x": torch.ones(count, op.num_heads, op.head_dim),  # type: ignore[attr-defined]
        "dt": torch.zeros(count, op.num_heads),  # type: ignore[attr-defined]
        "a": torch.full((op.num_heads,), -1e-30),  # type: ignore[attr-defined]
        "b": torch.eye(width)[names][:, None].expand(count, groups, width),
        "c": (2.0 ** torch.arange(width).remainder(4)).expand(count, groups, width),
        "d": torch.full((op.num_heads,), 0.5),  # type: ignore[attr-defined]
        "dt_bias": torch.zeros(op.num_heads),  # type: ignore[attr-defined]
    }
    sums = torch.cumsum(2.0**names, 0)

    def all_of(rows: Tensor) -> Tensor:
        return rows.double()[:, None, None].expand(count, op.num_heads, op.head_dim)  # type: ignore[attr-defined]

    suspects = known(
        {
            "d: it is left out": all_of(sums),
            "order: c reads the state before the token": all_of(sums - 2.0**names + 0.5),
            "state: only the token itself counts": all_of(2.0**names + 0.5),
        }
    )
    out = _run(subject, layer, inputs, count)
    subject.agree(op, out, all_of(sums + 0.5), 0.0, "(tokens counted) result", suspects=suspects)


@check("L1/ssd/decay", DTYPES)
def test_a_strong_decay_forgets_everything(subject: Subject, variant: DType) -> None:
    """a = -200 and steps of 1: only the present token is left, whatever the state held."""
    layer = ssd(variant, dt_min=1.0, dt_max=1.0)
    op = layer.op
    subject.bind(op)
    step = StateStep(subject, layer, [Lane(tokens=3, slots=(4,))])
    step.inputs["a"].fill_(-200.0)
    step.inputs["d"].fill_(0.0)
    for name in ("b", "c"):
        step.inputs[name].copy_(torch.eye(op.state_dim)[0].expand_as(step.inputs[name]))  # type: ignore[attr-defined]
    exact = step.inputs["x"].double()
    subject.agree(op, step.run(step.plane("nan")), exact, 0.0, "(the token alone) result")
