"""route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import RouteArgs, RouteOp
from core_triton.ops.refusals import invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__: list[str] = []

_MOST_EXPERTS = 1024


def _constexprs(op: RouteOp) -> dict[str, Any]:
    return {
        "SCORING": op.scoring,
        "HAS_BIAS": op.has("bias"),
        "RENORMALIZE": op.renormalize,
        "SCALING": op.scaling,
        "NUM_EXPERTS": op.num_experts,
        "TOP_K": op.top_k,
        "NUM_GROUPS": op.num_groups,
        "TOP_GROUPS": op.top_k_groups if op.num_groups > 1 else 1,
        "BLOCK": power_of_two(op.num_experts),
        "BLOCK_GROUPS": power_of_two(op.num_groups),
        "BLOCK_K": power_of_two(op.top_k),
    }


def _bind(op: RouteOp, target: Target) -> Callable[[RouteArgs], tuple[Tensor, Tensor]]:
    from core_triton.kernels.route import route_kernel

    constexprs = _constexprs(op)

    def route(args: RouteArgs) -> tuple[Tensor, Tensor]:
        logits = args.router_logits
        weights = torch.empty(len(logits), op.top_k, dtype=torch.float32, device=logits.device)
        ids = torch.empty(len(logits), op.top_k, dtype=torch.int32, device=logits.device)
        if len(logits):
            bias = logits if args.bias is None else args.bias
            route_kernel[(len(logits),)](logits, bias, weights, ids, logits.stride(0), **constexprs, num_warps=1)
        return weights, ids

    return route


def _refuse(op: RouteOp, target: Target) -> str:
    if op.num_experts > _MOST_EXPERTS:
        return f"{op.num_experts} experts, more than the {_MOST_EXPERTS} that a program holds"
    return refuse_form(op, ("bias",))


def _builds(target: Target) -> Sequence[Build]:
    from core.spec import DType
    from core_triton.kernels.route import route_kernel

    half = DType.BFLOAT16
    grouped = RouteOp(
        dtype=half, features=frozenset({"bias"}), num_experts=256, top_k=8, scoring="sigmoid", num_groups=8,
        top_k_groups=4, scaling=2.5,
    )  # fmt: skip
    plain = RouteOp(dtype=half, num_experts=128, top_k=8)
    return [
        Build(
            kernel=route_kernel,
            label=f"route {label}",
            signature={
                "logits": "*fp32", "bias": "*fp32", "weights": "*fp32", "ids": "*i32", "logits_stride": "i32",
            },
            constexprs=_constexprs(op),
            num_warps=1,
            divisible=("logits", "logits_stride"),
        )
        for label, op in (("of 256 in groups", grouped), ("of 128", plain))
    ]  # fmt: skip


register("route", Kernel(refuse=_refuse, bind=_bind, builds=_builds, verdict=invariant))
