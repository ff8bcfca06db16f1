"""conv1d: a launch for the results, and one for the states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import Conv1dArgs, Conv1dOp
from core.spec import DType
from core_triton.ops.recurrent import SLOT_SIGNATURE, slots_of
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__: list[str] = []


def _tuning(op: Conv1dOp, target: Target) -> tuple[Tuning, int]:
    tuning = tunings("recurrent", target)["conv1d"]
    return tuning, min(tuning["BLOCK"], power_of_two(op.channels))


def _bind(op: Conv1dOp, target: Target) -> Callable[[Conv1dArgs], Tensor]:
    from core_triton.kernels.conv1d import conv1d_kernel, conv1d_state_kernel

    tuning, block = _tuning(op, target)
    launch: dict[str, Any] = {"WIDTH": op.width, "BLOCK": block, "num_warps": tuning.num_warps}
    blocks, dtype = -(-op.channels // block), torch_dtype(op.dtype)

    def conv1d(args: Conv1dArgs) -> Tensor:
        x, plane, tokens, requests = args.x, args.cache[0], args.x.shape[0], args.plan.batch.num_reqs
        out = torch.empty((tokens, op.channels), dtype=dtype, device=x.device)
        if not tokens or not requests:
            return out
        starts, slots, accepted, checkpoints, constants = slots_of(args.plan)
        conv1d_kernel[(tokens, blocks)](
            *(x, args.weight, x if args.bias is None else args.bias, plane, out, starts, slots, accepted),
            *(requests, op.channels, x.stride(0), args.weight.stride(0), *plane.stride()[:2], slots.stride(0)),
            BIAS=args.bias is not None,
            SILU=op.activation == "silu",
            **launch,
        )
        if op.width > 1:
            conv1d_state_kernel[(requests, blocks)](
                *(x, plane, starts, slots, accepted, checkpoints, op.channels, slots.shape[1]),
                *(x.stride(0), *plane.stride()[:2], slots.stride(0)),
                BLOCK_W=power_of_two(op.width - 1),
                **constants,
                **launch,
            )
        return out

    return conv1d


_STRIDES = ("x_stride", "slot_stride", "row_stride", "table_stride")


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.conv1d import conv1d_kernel, conv1d_state_kernel

    found = []
    for dtype, word in FLOATS.items():
        op = Conv1dOp(dtype=dtype, channels=8192, width=4)
        tuning, block = _tuning(op, target)
        pointers = dict.fromkeys(("x", "weight", "bias", "plane", "out"), f"*{word}")
        numbers = dict.fromkeys(("num_requests", "num_slots", "channels", "w_stride", *_STRIDES), "i32")
        results = {name: numbers[name] for name in ("num_requests", "channels", "w_stride", *_STRIDES)}
        states = {name: numbers[name] for name in ("channels", "num_slots", *_STRIDES)}
        slots = {name: kind for name, kind in SLOT_SIGNATURE.items() if name != "checkpoints"}
        aligned = ("x", "plane", "out", "channels", *_STRIDES[:3])
        found.append(
            Build(
                kernel=conv1d_kernel,
                label=f"results {word}",
                signature={**pointers, **slots, **results},
                constexprs={"WIDTH": 4, "BIAS": dtype is DType.BFLOAT16, "SILU": True, "BLOCK": block},
                divisible=aligned,
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
            )
        )
        found.append(
            Build(
                kernel=conv1d_state_kernel,
                label=f"states {word}",
                signature={"x": f"*{word}", "plane": f"*{word}", **SLOT_SIGNATURE, **states},
                constexprs={"WIDTH": 4, "CHECKPOINTS": True, "BLOCK_W": 4, "BLOCK": block},
                divisible=aligned,
                num_warps=tuning.num_warps,
                num_stages=tuning.num_stages,
            )
        )
    return found


register(
    "conv1d",
    Kernel(refuse=lambda op, target: refuse_form(op, ("bias",)), bind=_bind, builds=_builds, verdict=invariant),
)
