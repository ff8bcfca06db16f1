"""ssd: Mamba-2's recurrence, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import SsdArgs, SsdOp
from core_triton.ops.recurrent import SLOT_SIGNATURE, slots_of
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import tunings

__all__: list[str] = []

_MOST_STATE = 1024


def _constants(op: SsdOp, target: Target) -> dict[str, Any]:
    block_n = power_of_two(op.state_dim)
    rows = max(1, tunings("recurrent", target)["ssd"]["elements"] // block_n)
    return {
        "GROUP": op.num_heads // op.num_groups,
        "HEAD_DIM": op.head_dim,
        "STATE_DIM": op.state_dim,
        "BLOCK_P": min(power_of_two(op.head_dim), rows),
        "BLOCK_N": block_n,
    }


def _bind(op: SsdOp, target: Target) -> Callable[[SsdArgs], Tensor]:
    from core_triton.kernels.ssd import ssd_kernel

    sizes, dtype = _constants(op, target), torch_dtype(op.dtype)
    tuning = tunings("recurrent", target)["ssd"]

    def ssd(args: SsdArgs) -> Tensor:
        x, plane, requests = args.x, args.cache[0], args.plan.batch.num_reqs
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        if requests:
            starts, slots, accepted, checkpoints, constants = slots_of(args.plan)
            ssd_kernel[(requests, op.num_heads, -(-op.head_dim // sizes["BLOCK_P"]))](
                *(x, args.dt, args.a, args.b, args.c, args.d, args.dt_bias, plane, out),
                *(starts, slots, accepted, checkpoints, slots.shape[1], op.dt_min, op.dt_max),
                *(*x.stride()[:2], args.dt.stride(0), *args.b.stride()[:2], *args.c.stride()[:2]),
                *(*plane.stride()[:3], slots.stride(0)),
                **sizes,
                **constants,
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
            )
        return out

    return ssd


def _refuse(op: SsdOp, target: Target) -> str:
    return refuse_form(op) or (f"no kernel for states of more than {_MOST_STATE}" if op.state_dim > _MOST_STATE else "")


_STRIDES = (
    *("x_stride", "x_head_stride", "dt_stride", "b_stride", "b_group_stride", "c_stride", "c_group_stride"),
    *("slot_stride", "head_stride", "row_stride", "table_stride"),
)


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.ssd import ssd_kernel

    found, tuning = [], tunings("recurrent", target)["ssd"]
    for dtype, word in FLOATS.items():
        op = SsdOp(dtype=dtype, num_heads=64, head_dim=64, num_groups=8, state_dim=128)
        found.append(
            Build(
                kernel=ssd_kernel,
                label=f"step {word}",
                signature={
                    **dict.fromkeys(("x", "b", "c", "out"), f"*{word}"),
                    **dict.fromkeys(("dt", "a", "d", "dt_bias", "plane"), "*fp32"),
                    **SLOT_SIGNATURE,
                    "num_slots": "i32",
                    **dict.fromkeys(("dt_min", "dt_max"), "fp32"),
                    **dict.fromkeys(_STRIDES, "i32"),
                },
                constexprs={**_constants(op, target), "CHECKPOINTS": True},
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
                divisible=("x", "b", "c", "plane", "out", "x_stride", "x_head_stride", *_STRIDES[3:10]),
            )
        )
    return found


register("ssd", Kernel(refuse=_refuse, bind=_bind, builds=_builds, verdict=invariant))
