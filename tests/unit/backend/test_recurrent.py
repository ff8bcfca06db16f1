"""`conv1d`, `gated_delta` and `ssd` of the reference: their arithmetic, and where states are read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from bare import bound
from paged import dtype_of, i32, make_plan
from torch import Tensor

from core.backend import Plan
from core.backend.ops import (
    Conv1dArgs,
    Conv1dOp,
    Determinism,
    GatedDeltaArgs,
    GatedDeltaOp,
    OpSpec,
    SsdArgs,
    SsdOp,
)
from core.spec import DType

CHANNELS, WIDTH = 5, 4
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 3, 6
HEADS, HEAD_DIM, GROUPS, STATE = 4, 3, 2, 5
SLOTS = 14

Inputs = dict[str, Tensor]


@dataclass
class Layer:
    """One recurrent layer: its operation, random inputs for T tokens, and a plain recurrence for one request."""

    op: OpSpec
    state_shape: tuple[int, ...]
    inputs: Callable[[int], Inputs]
    recur: Callable[[OpSpec, Inputs, np.ndarray[Any, Any]], tuple[list[Any], list[Any]]]

    def run(self, inputs: Inputs, plane: Tensor, plan: Plan) -> Tensor:
        """The reference over one plane of states."""
        args = self.op.args(**inputs, cache=(plane,), plan=plan)  # type: ignore[call-arg]
        out: Tensor = bound(self.op)(args)
        return out


PER_TOKEN = {"x", "query", "key", "value", "gate", "beta", "dt", "b", "c"}


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """The tokens of a slice; weights stay whole."""
    return {name: value[rows] if name in PER_TOKEN else value for name, value in inputs.items()}


def recur_conv(op: Any, inputs: Inputs, state: Any) -> tuple[list[Any], list[Any]]:
    x, weight = inputs["x"].double().numpy(), inputs["weight"].double().numpy()
    outs, states = [], []
    for token in x:
        window = np.concatenate((state, token[None]))
        y = np.array([window[:, c] @ weight[c] for c in range(CHANNELS)]) + inputs["bias"].double().numpy()
        outs.append(y / (1 + np.exp(-y)))
        state = window[1:]
        states.append(state)
    return outs, states


def recur_delta(op: Any, inputs: Inputs, state: Any) -> tuple[list[Any], list[Any]]:
    values = {name: value.double().numpy() for name, value in inputs.items()}
    outs, states = [], []
    for t in range(len(values["value"])):
        state, out = state.copy(), np.zeros((V_HEADS, V_DIM))
        for h in range(V_HEADS):
            q, k = values["query"][t, h // 2], values["key"][t, h // 2]
            if op.qk_l2norm:
                q, k = (v / np.sqrt((v * v).sum() + 1e-6) for v in (q, k))
            s = np.exp(values["gate"][t, h]) * state[h]
            s = s + np.outer(k, values["beta"][t, h] * (values["value"][t, h] - s.T @ k))
            state[h], out[h] = s, s.T @ (op.scale * q)
        outs.append(out)
        states.append(state)
    return outs, states


def recur_ssd(op: Any, inputs: Inputs, state: Any) -> tuple[list[Any], list[Any]]:
    values = {name: value.double().numpy() for name, value in inputs.items()}
    outs, states = [], []
    for t in range(len(values["x"])):
        state, out = state.copy(), np.zeros((HEADS, HEAD_DIM))
        for h in range(HEADS):
            size = np.clip(np.log1p(np.exp(values["dt"][t, h] + values["dt_bias"][h])), op.dt_min, op.dt_max)
            x, b, c = values["x"][t, h], values["b"][t, h // 2], values["c"][t, h // 2]
            state[h] = np.exp(size * values["a"][h]) * state[h] + size * np.outer(x, b)
            out[h] = state[h] @ c + values["d"][h] * x
        outs.append(out)
        states.append(state)
    return outs, states


def conv_inputs(n: int) -> Inputs:
    return {"x": torch.randn(n, CHANNELS), "weight": torch.randn(CHANNELS, WIDTH), "bias": torch.randn(CHANNELS)}


def delta_inputs(n: int) -> Inputs:
    return {
        "query": torch.randn(n, K_HEADS, K_DIM),
        "key": torch.randn(n, K_HEADS, K_DIM),
        "value": torch.randn(n, V_HEADS, V_DIM),
        "gate": -torch.rand(n, V_HEADS),
        "beta": torch.rand(n, V_HEADS),
    }


def ssd_inputs(n: int) -> Inputs:
    return {
        "x": torch.randn(n, HEADS, HEAD_DIM),
        "dt": torch.randn(n, HEADS),
        "a": -torch.rand(HEADS) - 0.1,
        "b": torch.randn(n, GROUPS, STATE),
        "c": torch.randn(n, GROUPS, STATE),
        "d": torch.randn(HEADS),
        "dt_bias": torch.randn(HEADS),
    }


LAYERS = {
    "conv1d": Layer(
        Conv1dOp(dtype=DType.FLOAT64, features=frozenset({"bias"}), channels=CHANNELS, width=WIDTH),
        (WIDTH - 1, CHANNELS),
        conv_inputs,
        recur_conv,
    ),
    "gated_delta": Layer(
        GatedDeltaOp(
            dtype=DType.FLOAT64, num_k_heads=K_HEADS, num_v_heads=V_HEADS, k_dim=K_DIM, v_dim=V_DIM, scale=0.6
        ),
        (V_HEADS, K_DIM, V_DIM),
        delta_inputs,
        recur_delta,
    ),
    "ssd": Layer(
        SsdOp(
            dtype=DType.FLOAT64,
            num_heads=HEADS,
            head_dim=HEAD_DIM,
            num_groups=GROUPS,
            state_dim=STATE,
            dt_min=0.2,
            dt_max=1.5,
        ),
        (HEADS, HEAD_DIM, STATE),
        ssd_inputs,
        recur_ssd,
    ),
}
EVERY = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def pool(layer: Layer) -> Tensor:
    """States of all slots; the null slot is poison."""
    plane = torch.randn(SLOTS, *layer.state_shape, dtype=torch.float64)
    plane[0] = float("nan")
    return plane


def wide(inputs: Inputs) -> Inputs:
    return {name: value.double() for name, value in inputs.items()}


@dataclass
class Row:
    """One request: tokens of the step, accepted tokens of the last, slots, checkpoint."""

    tokens: int
    accepted: int
    slots: tuple[int, ...]
    checkpoint: int = -1


def plan_of(rows: list[Row]) -> Plan:
    counts = [row.tokens for row in rows]
    return make_plan(
        counts,
        counts,
        state_slots=i32([list(row.slots) for row in rows]),
        num_accepted=i32([row.accepted for row in rows]),
        checkpoint_slots=i32([row.checkpoint for row in rows]),
    )


def check(layer: Layer, rows: list[Row]) -> None:
    plane = pool(layer)
    before = plane.clone()
    inputs = wide(layer.inputs(sum(row.tokens for row in rows)))
    out = layer.run(inputs, plane, plan_of(rows))
    expected, start = before.clone(), 0
    for row in rows:
        source = row.slots[row.accepted - 1] if row.accepted else 0
        state = before[source].numpy() if source else np.zeros(layer.state_shape)
        tokens = slice(start, start + row.tokens)
        outs, states = layer.recur(layer.op, rows_of(inputs, tokens), state)
        torch.testing.assert_close(out[tokens], torch.from_numpy(np.stack(outs)), rtol=1e-11, atol=1e-11)
        if row.tokens <= len(row.slots):
            kept = dict(zip(row.slots, states, strict=False))
        else:
            kept = {row.slots[0]: states[-1]}
        if row.checkpoint >= 0:
            kept[row.checkpoint] = states[-1]
        for slot, after in kept.items():
            if slot > 0:
                expected[slot] = torch.from_numpy(after)
        start += row.tokens
    torch.testing.assert_close(plane, expected, rtol=1e-11, atol=1e-11, equal_nan=True)


@EVERY
def test_decodes_with_speculation_keep_a_state_after_each_token(layer: Layer) -> None:
    check(layer, [Row(1, 1, (3, 4, 5)), Row(2, 3, (6, 7, 8)), Row(3, 2, (9, 10, 11))])


@EVERY
def test_prompts_start_from_zero_and_keep_only_their_end(layer: Layer) -> None:
    check(layer, [Row(1, 1, (3,)), Row(5, 0, (6,)), Row(7, 1, (9,))])


@EVERY
def test_mixed_batch_with_checkpoints(layer: Layer) -> None:
    check(layer, [Row(1, 2, (1, 2), 12), Row(2, 0, (3, 4), 13), Row(6, 1, (5, 6), 7), Row(9, 0, (8, 9))])


@EVERY
def test_a_chunk_shorter_than_the_window(layer: Layer) -> None:
    check(layer, [Row(2, 1, (3,)), Row(1, 0, (4,))])


@EVERY
def test_padding_rows_write_nowhere_and_stay_finite(layer: Layer) -> None:
    plane = pool(layer)
    before = plane.clone()
    rows = [Row(1, 1, (3, 4)), Row(1, 0, (0, 0)), Row(1, 1, (0, 0)), Row(1, 1, (-1, -1), 0)]
    out = layer.run(wide(layer.inputs(4)), plane, plan_of(rows))
    assert out.isfinite().all()
    plane[3] = before[3]
    assert torch.equal(plane.nan_to_num(7.0), before.nan_to_num(7.0))


@EVERY
def test_chunks_join_to_the_whole_in_every_class(layer: Layer) -> None:
    op = dataclasses.replace(layer.op, dtype=DType.FLOAT32, determinism=Determinism.D3)
    layer = dataclasses.replace(layer, op=op)
    inputs = layer.inputs(9)
    whole = layer.run(inputs, pool(layer).float(), plan_of([Row(9, 0, (3,))]))
    plane, parts = pool(layer).float(), []
    for start, end in ((0, 4), (4, 5), (5, 9)):
        row = Row(end - start, int(start > 0), (3,))
        parts.append(layer.run(rows_of(inputs, slice(start, end)), plane, plan_of([row])))
    assert torch.equal(torch.cat(parts), whole)


@EVERY
def test_other_requests_do_not_show_in_class_d2(layer: Layer) -> None:
    op = dataclasses.replace(layer.op, dtype=DType.FLOAT32, determinism=Determinism.D2)
    layer = dataclasses.replace(layer, op=op)
    inputs = layer.inputs(5)
    both = layer.run(inputs, pool(layer).float(), plan_of([Row(2, 0, (3, 4)), Row(3, 0, (5, 6))]))
    alone = layer.run(rows_of(inputs, slice(2, 5)), pool(layer).float(), plan_of([Row(3, 0, (9, 8))]))
    assert torch.equal(alone, both[2:])


@EVERY
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_low_precision_is_rounded_once(layer: Layer, dtype: DType) -> None:
    kept = {"gate", "beta", "dt", "a", "d", "dt_bias"}
    inputs = {k: v if k in kept else v.to(dtype_of(dtype)) for k, v in layer.inputs(6).items()}
    plan = plan_of([Row(1, 0, (3,)), Row(5, 0, (4,))])
    low = dataclasses.replace(layer, op=dataclasses.replace(layer.op, dtype=dtype))
    out = low.run(inputs, pool(layer).float(), plan)
    exact = layer.run(wide(inputs), pool(layer), plan)
    unit = 2.0**-8 if dtype is DType.BFLOAT16 else 2.0**-11
    assert out.dtype == dtype_of(dtype)
    assert ((out.double() - exact).abs() <= 1.1 * unit * exact.abs() + 1e-5).all()


def test_conv1d_equals_qwen3_next() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    inputs = conv_inputs(11)
    op = dataclasses.replace(LAYERS["conv1d"].op, dtype=DType.FLOAT32)
    plane = torch.zeros(SLOTS, WIDTH - 1, CHANNELS)
    out = bound(op)(Conv1dArgs(**inputs, cache=(plane,), plan=plan_of([Row(11, 0, (3,))])))
    expected = causal_conv1d_fn(inputs["x"].T[None], inputs["weight"], inputs["bias"], activation="silu")
    torch.testing.assert_close(out, expected[0].T, rtol=1e-5, atol=1e-6)


def test_conv1d_without_activation_or_bias() -> None:
    inputs = conv_inputs(4)
    op = Conv1dOp(dtype=DType.FLOAT32, channels=CHANNELS, width=WIDTH, activation="none")
    plane = torch.zeros(SLOTS, WIDTH - 1, CHANNELS)
    args = Conv1dArgs(x=inputs["x"], weight=inputs["weight"], cache=(plane,), plan=plan_of([Row(4, 0, (3,))]))
    expected = torch.nn.functional.conv1d(
        inputs["x"].T[None], inputs["weight"][:, None], padding=WIDTH - 1, groups=CHANNELS
    )[0, :, :4].T
    torch.testing.assert_close(bound(op)(args), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_gated_delta_equals_qwen3_next(form: str) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    inputs = delta_inputs(70)
    op = GatedDeltaOp(
        dtype=DType.FLOAT32, num_k_heads=K_HEADS, num_v_heads=V_HEADS, k_dim=K_DIM, v_dim=V_DIM, scale=K_DIM**-0.5
    )
    plane = torch.zeros(SLOTS, V_HEADS, K_DIM, V_DIM)
    out = bound(op)(GatedDeltaArgs(**inputs, cache=(plane,), plan=plan_of([Row(70, 0, (3,))])))
    ordered = [inputs[name][None] for name in ("query", "key", "value", "gate", "beta")]
    expected, state = getattr(qwen3_next, form)(*ordered, output_final_state=True, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plane[3], state[0], rtol=1e-4, atol=1e-5)


def test_gated_delta_without_norm() -> None:
    layer = LAYERS["gated_delta"]
    assert isinstance(layer.op, GatedDeltaOp)
    check(dataclasses.replace(layer, op=dataclasses.replace(layer.op, qk_l2norm=False)), [Row(4, 1, (3, 4))])


def test_ssd_equals_mamba2() -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    inputs = ssd_inputs(21)
    op = SsdOp(dtype=DType.FLOAT32, num_heads=HEADS, head_dim=HEAD_DIM, num_groups=GROUPS, state_dim=STATE, dt_min=0.1)
    plane = torch.zeros(SLOTS, HEADS, HEAD_DIM, STATE)
    out = bound(op)(SsdArgs(**inputs, cache=(plane,), plan=plan_of([Row(21, 0, (3,))])))
    x, dt, b, c = (inputs[name][None] for name in ("x", "dt", "b", "c"))
    expected, state = mamba2_chunk_scan(
        x,
        dt,
        inputs["a"],
        b,
        c,
        chunk_size=8,
        D=inputs["d"],
        dt_bias=inputs["dt_bias"],
        dt_softplus=True,
        dt_limit=(0.1, float("inf")),
        return_final_states=True,
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(plane[3], state[0], rtol=1e-4, atol=1e-5)
