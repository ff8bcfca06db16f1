"""Numerics of the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from core_ascend.limits import DELTA_DIM, MAX_DELTA_HEADS, MAX_DELTA_STEPS
from core_ascend.simulation.calls import numerics
from core_ascend.simulation.faults import need, need_contiguous

__all__: list[str] = []

_BF16 = torch.bfloat16


def _check(call: str, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, g: Tensor, state: Tensor) -> None:
    need_contiguous(call, query=query, key=key, value=value, beta=beta, g=g, state=state)
    for name, x in (("query", query), ("key", key), ("value", value), ("beta", beta), ("state", state)):
        need(x is not None and x.dtype is _BF16, f"{call}: {name} is not bfloat16")
    need(g is not None and g.dtype is torch.float32, f"{call}: g is not float32")
    tokens, heads = value.shape[:2]
    need(query.shape == key.shape and heads % query.shape[1] == 0, f"{call}: query {tuple(query.shape)}")
    need(beta.shape == g.shape == (tokens, heads), f"{call}: beta and g are [tokens, value heads]")
    need(state.shape[1:] == (heads, value.shape[2], query.shape[2]), f"{call}: states are [n, heads, v_dim, k_dim]")
    lengths = query.float().norm(dim=-1)
    need(bool(((lengths - 1).abs() < 0.05).all() | (lengths < 1).all()), f"{call}: queries are not normalised")


def _step(state: Tensor, t: int, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, g: Tensor, scale: float):  # type: ignore[no-untyped-def]
    repeat = value.shape[1] // query.shape[1]
    q, k = (x[t].float().repeat_interleave(repeat, 0) for x in (query, key))
    state = state * g[t].exp()[:, None, None]
    error = value[t].float() - torch.einsum("hvk,hk->hv", state, k)
    state = state + torch.einsum("hv,hk->hvk", error * beta[t].float()[:, None], k)
    return state, torch.einsum("hvk,hk->hv", state, q * scale)


@numerics("npu::npu_chunk_gated_delta_rule")
def _chunk(query, key, value, *, beta=None, initial_state=None, actual_seq_lengths=None, scale=None, g=None):  # type: ignore[no-untyped-def]
    call = "npu_chunk_gated_delta_rule"
    _check(call, query, key, value, beta, g, initial_state)
    need(query.shape[2] == value.shape[2] == DELTA_DIM, f"{call}: heads of {DELTA_DIM}")
    need(value.shape[1] <= MAX_DELTA_HEADS, f"{call}: {value.shape[1]} heads")
    need(actual_seq_lengths.dtype is torch.int32, f"{call}: lengths are int32")
    counts = actual_seq_lengths.tolist()
    need(sum(counts) == len(query) and len(counts) == len(initial_state), f"{call}: lengths {counts}")
    out, ends, start = torch.empty_like(value), torch.empty_like(initial_state), 0
    for request, count in enumerate(counts):
        state = initial_state[request].float()
        for t in range(start, start + count):
            state, mixed = _step(state, t, query, key, value, beta, g, scale)
            out[t] = mixed.to(_BF16)
        ends[request] = state.to(_BF16)
        start += count
    return out, ends


@numerics("npu::npu_recurrent_gated_delta_rule")
def _recurrent(query, key, value, state, *, beta=None, scale=None, actual_seq_lengths=None, ssm_state_indices=None,  # type: ignore[no-untyped-def]
               num_accepted_tokens=None, g=None):  # fmt: skip
    call = "npu_recurrent_gated_delta_rule"
    _check(call, query, key, value, beta, g, state)
    for name, x in (("lengths", actual_seq_lengths), ("indices", ssm_state_indices), ("accepted", num_accepted_tokens)):
        need(x.dtype is torch.int32, f"{call}: {name} are {x.dtype}, not int32")
    counts, accepted, places = actual_seq_lengths.tolist(), num_accepted_tokens.tolist(), ssm_state_indices.tolist()
    need(max(counts) <= MAX_DELTA_STEPS, f"{call}: {max(counts)} tokens of a request, at most {MAX_DELTA_STEPS}")
    need(sum(counts) == len(query) == len(places), f"{call}: lengths {counts}")
    need(all(1 <= n <= MAX_DELTA_STEPS for n in accepted), f"{call}: accepted tokens {accepted}")
    out, start = torch.empty_like(value), 0
    for count, taken in zip(counts, accepted, strict=True):
        # The slots of a request are those of its tokens; the state after the last accepted one is where it starts.
        first = places[start] + taken - 1 if count else 0
        current = state[first].float()
        for t in range(start, start + count):
            current, mixed = _step(current, t, query, key, value, beta, g, scale)
            out[t] = mixed.to(_BF16)
            state[places[t]] = current.to(_BF16)
        start += count
    return out
