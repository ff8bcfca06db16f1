"""Reference of latent attention, sparse indexing, and the recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from core.backend.layout import torch_dtype
from core.backend.ops.family import (
    Conv1dArgs,
    Conv1dOp,
    GatedDeltaArgs,
    GatedDeltaOp,
    IndexTopkArgs,
    IndexTopkOp,
    MergeLseArgs,
    MergeLseOp,
    MlaArgs,
    MlaOp,
    SsdArgs,
    SsdOp,
)
from core.backend.reference.cache import Span, owned_keys, softmax_mix, spans, split_for
from core.backend.reference.experts import largest
from core.backend.reference.precision import alone, row_by_row, wide
from core.backend.reference.registry import composite
from core.backend.reference.states import lanes, load_states, run_recurrence, store_states

__all__: list[str] = []


@composite("mla")
def make_mla(op: MlaOp) -> Callable[[MlaArgs], Tensor]:
    """Attention of all heads over one latent, request by request."""

    def mla(args: MlaArgs) -> Tensor:
        out = torch.zeros_like(args.q_latent, dtype=torch_dtype(op.dtype))
        if args.lse is not None:
            args.lse.fill_(-torch.inf)
        for span in spans(args.plan):
            for part in split_for(op.determinism, span):
                mixed, lse = _attend_latent(op, args, part)
                out[part.start : part.end] = mixed.to(out.dtype)
                if args.lse is not None:
                    args.lse[part.start : part.end] = lse.to(args.lse.dtype)
        return out

    return mla


def _attend_latent(op: MlaOp, args: MlaArgs, span: Span) -> tuple[Tensor, Tensor]:
    stored, owned = owned_keys(args.cache[0], args.plan, span)
    keys = stored.flatten(1).to(wide(op))
    tokens = slice(span.start, span.end)
    query = torch.cat((args.q_latent[tokens], args.q_rope[tokens]), dim=-1).to(keys.dtype)
    seen = _causal(span, owned)
    if args.indices is not None:
        seen = seen & _chosen(args.indices[tokens], span.seq_len)
    logits = torch.matmul(query.transpose(0, 1), keys.T) * op.scale
    return softmax_mix(logits, seen, keys[:, None, : op.latent_dim], None)


def _causal(span: Span, owned: Tensor) -> Tensor:
    """[queries, keys], bool: the keys up to each query's position that the request owns."""
    keys_at = torch.arange(span.seq_len, device=owned.device)
    return owned & (keys_at <= keys_at[span.first_position :, None])


def _chosen(indices: Tensor, num_keys: int) -> Tensor:
    """[queries, keys], bool, from positions of which -1 means none."""
    # One column more than there are keys takes what points nowhere.
    where = torch.where((indices < 0) | (indices >= num_keys), num_keys, indices).long()
    table = torch.zeros(len(indices), num_keys + 1, dtype=torch.bool, device=indices.device)
    return table.scatter(1, where, True)[:, :num_keys]


@composite("index_topk")
def make_index_topk(op: IndexTopkOp) -> Callable[[IndexTopkArgs], Tensor]:
    """The best positions of each query, request by request."""

    def index_topk(args: IndexTopkArgs) -> Tensor:
        out = torch.full((len(args.query), op.top_k), -1, dtype=torch.int32, device=args.query.device)
        for span in spans(args.plan):
            for part in split_for(op.determinism, span):
                scores = _index_scores(op, args, part)
                best = largest(scores, op.top_k)
                best = torch.where(scores.gather(1, best) == -torch.inf, -1, best)
                out[part.start : part.end, : best.shape[1]] = best.to(torch.int32)
        return out

    return index_topk


def _index_scores(op: IndexTopkOp, args: IndexTopkArgs, span: Span) -> Tensor:
    """[queries, keys]; -inf for keys that are out of sight."""
    stored, owned = owned_keys(args.cache[0], args.plan, span)
    keys, tokens = stored.flatten(1).to(wide(op)), slice(span.start, span.end)
    products = torch.matmul(args.query[tokens].to(keys.dtype), keys.T).relu()
    scores = (products * args.weights[tokens].to(keys.dtype)[:, :, None]).sum(1)
    return torch.where(_causal(span, owned), scores, -torch.inf)


@composite("conv1d")
def make_conv1d(op: Conv1dOp) -> Callable[[Conv1dArgs], Tensor]:
    """Each request's inputs after its state, weighted along a window of `width`."""

    def conv1d(args: Conv1dArgs) -> Tensor:
        out = torch.zeros_like(args.x, dtype=wide(op))
        weight, plane = args.weight.to(out.dtype), args.cache[0]
        for lane in lanes(args.plan):
            tokens = slice(lane.start, lane.start + lane.num_tokens)
            inputs = torch.cat((load_states(plane, [lane], out.dtype)[0], args.x[tokens].to(out.dtype)))
            out[tokens] = _weighted(inputs, weight)
            for token in range(lane.num_tokens):
                if lane.targets(token):
                    store_states(plane, inputs[None, token + 1 : token + op.width], [lane], token)
        if args.bias is not None:
            out += args.bias.to(out.dtype)
        return (row_by_row(op, F.silu, out) if op.activation == "silu" else out).to(torch_dtype(op.dtype))

    return conv1d


def _weighted(inputs: Tensor, weight: Tensor) -> Tensor:
    """[n, channels] of inputs [width - 1 + n, channels]: tap after tap, in this order for every token."""
    width = weight.shape[1]
    count = len(inputs) - width + 1
    total = inputs[:count] * weight[:, 0]
    for tap in range(1, width):
        total += inputs[tap : tap + count] * weight[:, tap]
    return total


@composite("gated_delta")
def make_gated_delta(op: GatedDeltaOp) -> Callable[[GatedDeltaArgs], Tensor]:
    """The recurrence as it is written, token by token."""

    def gated_delta(args: GatedDeltaArgs) -> Tensor:
        query, key = _delta_heads(op, args.query) * op.scale, _delta_heads(op, args.key)
        value = args.value.to(query.dtype)
        decay, beta = row_by_row(op, torch.exp, args.gate.to(query.dtype)), args.beta.to(query.dtype)

        def step(state: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            state = decay[t, :, None, None] * state
            error = value[t] - torch.matmul(key[t][:, :, None], state).squeeze(2)
            state = state + key[t][..., None] * (beta[t, :, None] * error)[:, :, None]
            return state, torch.matmul(query[t][:, :, None], state).squeeze(2)

        out = torch.zeros_like(value)
        run_recurrence(args.plan, args.cache[0], out, step, alone(op))
        return out.to(torch_dtype(op.dtype))

    return gated_delta


def _delta_heads(op: GatedDeltaOp, x: Tensor) -> Tensor:
    """[T, num_v_heads, k_dim]: each key head for its value heads, of length one where asked for."""
    x = x.to(wide(op))
    if op.qk_l2norm:
        x = x * torch.rsqrt(row_by_row(op, lambda rows: rows.square().sum(-1, keepdim=True), x) + 1e-6)
    return x.repeat_interleave(op.num_v_heads // op.num_k_heads, dim=1)


@composite("ssd")
def make_ssd(op: SsdOp) -> Callable[[SsdArgs], Tensor]:
    """The recurrence as it is written, token by token."""
    acc, per_group = wide(op), op.num_heads // op.num_groups

    def ssd(args: SsdArgs) -> Tensor:
        x = args.x.to(acc)
        b, c = (part.to(acc).repeat_interleave(per_group, dim=1) for part in (args.b, args.c))
        size = row_by_row(op, F.softplus, args.dt.to(acc) + args.dt_bias.to(acc)).clamp(op.dt_min, op.dt_max)
        decay = row_by_row(op, torch.exp, size * args.a.to(acc))

        def step(state: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            added = (size[t, :, None] * x[t])[..., None] * b[t][:, :, None]
            state = decay[t, :, None, None] * state + added
            return state, torch.matmul(state, c[t][..., None]).squeeze(-1)

        out = torch.zeros_like(x)
        run_recurrence(args.plan, args.cache[0], out, step, alone(op))
        return (out + args.d.to(acc)[:, None] * x).to(torch_dtype(op.dtype))

    return ssd


@composite("merge_lse")
def make_merge_lse(op: MergeLseOp) -> Callable[[MergeLseArgs], tuple[Tensor, Tensor]]:
    """The parts weighted by their shares of the denominator."""

    def merge_lse(args: MergeLseArgs) -> tuple[Tensor, Tensor]:
        lses = args.lses.to(wide(op))
        peak = lses.amax(0)
        peak = torch.where(peak == -torch.inf, 0.0, peak)
        weights = row_by_row(op, torch.exp, (lses - peak).transpose(0, 1)).transpose(0, 1)
        total = weights.sum(0)
        # A part without keys may hold anything, so it is masked and not multiplied by zero.
        parts = torch.where(weights[..., None] > 0, weights[..., None] * args.outs.to(weights.dtype), 0.0)
        out = parts.sum(0) / torch.where(total == 0, 1.0, total)[..., None]
        return out.to(torch_dtype(op.dtype)), (peak + row_by_row(op, torch.log, total)).to(args.lses.dtype)

    return merge_lse
