"""The recurrent operations with inputs, and each recurrence written down token by token, without the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import Conv1dOp, GatedDeltaOp, SsdOp
from core.spec import DType
from core_conformance.operations.recurrent import Inputs, Layer

__all__ = ["conv1d", "gated_delta", "ssd"]

CHANNELS, WIDTH = 24, 4
K_HEADS, V_HEADS, K_DIM, V_DIM = 2, 4, 16, 24
HEADS, HEAD_DIM, GROUPS, STATE = 4, 12, 2, 16


def conv1d(dtype: DType, state_dtype: DType | None = None, *, bias: bool = True, **changes: Any) -> Layer:
    """A convolution of four taps; its state keeps inputs, in the model's type unless told otherwise."""
    op = Conv1dOp(
        dtype=dtype, features=frozenset({"bias"} if bias else ()), **({"channels": CHANNELS, "width": WIDTH} | changes)
    )

    def draw(count: int, dice: torch.Generator) -> Inputs:
        shapes: dict[str, tuple[int, ...]] = {"x": (count, op.channels), "weight": (op.channels, op.width)}
        shapes |= {"bias": (op.channels,)} if bias else {}
        return {name: torch.randn(*shape, generator=dice).to(torch_dtype(dtype)) for name, shape in shapes.items()}

    shape = (op.width - 1, op.channels)
    return Layer(op, shape, state_dtype or dtype, draw, frozenset({"x"}), _conv_tokens)


def _conv_tokens(op: Conv1dOp, inputs: Inputs, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    x, weight = inputs["x"].to(dtype), inputs["weight"].to(dtype)
    outs, states = [torch.zeros(0, op.channels, dtype=dtype)], []
    for token in x:
        window = torch.cat((state, token[None]))
        out = (window * weight.T).sum(0)
        if "bias" in inputs:
            out = out + inputs["bias"].to(dtype)
        outs.append((out * torch.sigmoid(out) if op.activation == "silu" else out)[None])
        state = window[1:]
        states.append(state)
    return torch.cat(outs), states


def gated_delta(dtype: DType, **changes: Any) -> Layer:
    """Two value heads to a key head; the state is float32."""
    fields: dict[str, Any] = {"num_k_heads": K_HEADS, "num_v_heads": V_HEADS, "k_dim": K_DIM, "v_dim": V_DIM}
    op = GatedDeltaOp(dtype=dtype, **(fields | {"scale": 0.25} | changes))
    per_token = frozenset({"query", "key", "value", "gate", "beta"})

    def draw(count: int, dice: torch.Generator) -> Inputs:
        kind = torch_dtype(dtype)
        query, key = (torch.randn(count, op.num_k_heads, op.k_dim, generator=dice) for _ in range(2))
        if not op.qk_l2norm:  # long keys would make the state explode
            key = F.normalize(key, dim=-1)
        return {
            "query": query.to(kind),
            "key": key.to(kind),
            "value": torch.randn(count, op.num_v_heads, op.v_dim, generator=dice).to(kind),
            "gate": -torch.rand(count, op.num_v_heads, generator=dice),
            "beta": torch.rand(count, op.num_v_heads, generator=dice),
        }

    shape = (op.num_v_heads, op.k_dim, op.v_dim)
    return Layer(op, shape, DType.FLOAT32, draw, per_token, _delta_tokens)


def _delta_tokens(op: GatedDeltaOp, inputs: Inputs, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    repeat = op.num_v_heads // op.num_k_heads
    query, key = (inputs[name].to(dtype) for name in ("query", "key"))
    if op.qk_l2norm:
        query, key = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(repeat, dim=1) for x in (query, key))
    value, gate, beta = (inputs[name].to(dtype) for name in ("value", "gate", "beta"))
    outs, states = [torch.zeros(0, op.num_v_heads, op.v_dim, dtype=dtype)], []
    for q, k, v, g, b in zip(query, key, value, gate, beta, strict=True):
        state = torch.exp(g)[:, None, None] * state
        missing = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * missing)
        outs.append(torch.einsum("hkv,hk->hv", state, op.scale * q)[None])
        states.append(state)
    return torch.cat(outs), states


def ssd(dtype: DType, **changes: Any) -> Layer:
    """Two heads to a group; step sizes are clamped; the state is float32."""
    fields: dict[str, Any] = {"num_heads": HEADS, "head_dim": HEAD_DIM, "num_groups": GROUPS, "state_dim": STATE}
    op = SsdOp(dtype=dtype, **(fields | {"dt_min": 0.1, "dt_max": 1.5} | changes))

    def draw(count: int, dice: torch.Generator) -> Inputs:
        kind = torch_dtype(dtype)
        return {
            "x": torch.randn(count, op.num_heads, op.head_dim, generator=dice).to(kind),
            "dt": torch.randn(count, op.num_heads, generator=dice) * 2,
            "a": -torch.rand(op.num_heads, generator=dice) - 0.1,
            "b": torch.randn(count, op.num_groups, op.state_dim, generator=dice).to(kind),
            "c": torch.randn(count, op.num_groups, op.state_dim, generator=dice).to(kind),
            "d": torch.randn(op.num_heads, generator=dice),
            "dt_bias": torch.randn(op.num_heads, generator=dice),
        }

    shape = (op.num_heads, op.head_dim, op.state_dim)
    return Layer(op, shape, DType.FLOAT32, draw, frozenset({"x", "dt", "b", "c"}), _ssd_tokens)


def _ssd_tokens(op: SsdOp, inputs: Inputs, state: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    values = {name: x.to(dtype) for name, x in inputs.items()}
    owner = torch.arange(op.num_heads) // (op.num_heads // op.num_groups)
    outs, states = [torch.zeros(0, op.num_heads, op.head_dim, dtype=dtype)], []
    for x, dt, b, c in zip(values["x"], values["dt"], values["b"], values["c"], strict=True):
        size = torch.log1p(torch.exp(dt + values["dt_bias"])).clamp(op.dt_min, op.dt_max)
        decay = torch.exp(size * values["a"])[:, None, None]
        state = decay * state + torch.einsum("hp,hn->hpn", size[:, None] * x, b[owner])
        outs.append((torch.einsum("hpn,hn->hp", state, c[owner]) + values["d"][:, None] * x)[None])
        states.append(state)
    return torch.cat(outs), states
