"""Numerics of the routing calls."""

from __future__ import annotations

import torch
from torch import Tensor

from core_ascend.limits import MAX_EXPERTS
from core_ascend.simulation import chip_types
from core_ascend.simulation.calls import numerics
from core_ascend.simulation.faults import need, need_contiguous, need_types

__all__: list[str] = []


def _largest(x: Tensor, count: int) -> Tensor:
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@numerics("npu::npu_moe_gating_top_k_softmax")
def _gating_softmax(x, finished=None, k=1):  # type: ignore[no-untyped-def]
    call = "npu_moe_gating_top_k_softmax"
    need_types(call, chip_types.floats, x=x)
    need(0 < k <= min(x.shape[-1], 1024) and finished is None, f"{call}: {k} of {x.shape[-1]} experts")
    scores = x.float().softmax(-1)
    ids = _largest(scores, k)
    rows = torch.arange(x.shape[0] * k, dtype=torch.int32).view(k, -1).T.contiguous()
    return scores.gather(-1, ids).to(x.dtype), ids.to(torch.int32), rows


@numerics("npu::npu_moe_gating_top_k")
def _gating(x, k, *, bias=None, k_group=1, group_count=1, group_select_mode=0, renorm=0, norm_type=0, out_flag=False,  # type: ignore[no-untyped-def]
            routed_scaling_factor=1.0, eps=1e-20):  # fmt: skip
    call = "npu_moe_gating_top_k"
    need_types(call, chip_types.floats, x=x, bias=bias)
    experts = x.shape[-1]
    need(x.dim() == 2 and experts <= MAX_EXPERTS, f"{call}: {tuple(x.shape)}")
    need(renorm == 0, f"{call}: renorm is 0")
    need(bias is None or bias.shape == (experts,), f"{call}: bias")
    per_group = experts // group_count
    need(
        experts % group_count == 0 and 1 <= k_group <= group_count, f"{call}: {group_count} groups of {experts} experts"
    )
    if group_count > 1:
        padded = -(-per_group // 32) * 32 * group_count
        need(per_group > 2 and padded <= MAX_EXPERTS, f"{call}: {group_count} groups of {per_group} experts")
    need(1 <= k <= per_group * k_group, f"{call}: {k} experts out of {k_group} groups of {per_group}")
    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.unflatten(-1, (group_count, -1))
        best = groups.topk(2 if group_select_mode == 1 else 1, dim=-1).values.sum(-1)
        stays = torch.zeros_like(best, dtype=torch.bool).scatter(-1, _largest(best, k_group), True)
        choice = groups.masked_fill(~stays[..., None], -torch.inf).flatten(-2)
    ids = _largest(choice, k)
    weights = scores.gather(-1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), ids.to(torch.int32), scores if out_flag else torch.empty(0)


@numerics("npu::npu_moe_init_routing_v2")
def _init_routing(x, expert_idx, *, scale=None, active_num=-1, expert_num=-1, expert_tokens_num_type=0,  # type: ignore[no-untyped-def]
                  expert_tokens_num_flag=False, quant_mode=-1, active_expert_range=()):  # fmt: skip
    call = "npu_moe_init_routing_v2"
    need_contiguous(call, x=x, expert_idx=expert_idx)
    need(expert_idx.dtype is torch.int32 and len(expert_idx) == len(x), f"{call}: expert ids are int32, a row a token")
    need(expert_tokens_num_type == 1 and expert_tokens_num_flag, f"{call}: counts are not asked for")
    need(quant_mode == -1, f"{call}: quant_mode {quant_mode} is not simulated")
    need(active_num == expert_idx.numel(), f"{call}: active_num {active_num} is not {expert_idx.numel()}")
    low, high = active_expert_range
    need(0 <= low < high <= expert_num <= 10240, f"{call}: experts [{low}, {high}) of {expert_num}")
    need(
        bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()),
        f"{call}: an expert id is outside of [0, {expert_num})",
    )
    need(scale is None or (scale.dtype is torch.float32 and scale.shape == (len(x),)), f"{call}: scale")
    top_k = expert_idx.shape[1]
    flat = expert_idx.flatten().long()
    order = torch.where((flat >= low) & (flat < high), flat, expert_num).sort(stable=True)
    valid = int((order.values < expert_num).sum())
    taken = order.indices[:valid]
    expanded = torch.full((len(flat), x.shape[1]), 77, dtype=x.dtype)  # past the valid rows: anything
    expanded[:valid] = x[taken // top_k]
    places = torch.full((len(flat),), -1, dtype=torch.int32)
    places[taken] = torch.arange(valid, dtype=torch.int32)
    counts = torch.bincount(flat[(flat >= low) & (flat < high)] - low, minlength=high - low)
    scales = torch.full((len(flat),), torch.nan)
    if scale is not None:
        scales[:valid] = scale[taken // top_k]
    return expanded, places, counts, scales


@numerics("npu::npu_moe_token_unpermute")
def _unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):  # type: ignore[no-untyped-def]
    call = "npu_moe_token_unpermute"
    need(probs is None and not padded_mode, f"{call}: weights and a padded mode are not simulated")
    need_types(call, chip_types.halves, permuted_tokens=permuted_tokens)
    need(sorted_indices.dtype in (torch.int32, torch.int64), f"{call}: indices are {sorted_indices.dtype}")
    need(sorted_indices.dim() == 1, f"{call}: indices have one dim")
    need(bool(((sorted_indices >= 0) & (sorted_indices < len(permuted_tokens))).all()), f"{call}: an index is outside")
    return permuted_tokens[sorted_indices.long()]
