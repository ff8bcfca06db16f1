"""act_mul."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import ActMulArgs, ActMulOp
from core_triton.ops.refusals import FLOATS, invariant, refuse_form
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target

__all__: list[str] = []

_BLOCK = 1024


def _bind(op: ActMulOp, target: Target) -> Callable[[ActMulArgs], Tensor]:
    from core_triton.kernels.activation import act_mul_kernel

    dtype, blocks = torch_dtype(op.dtype), -(-op.size // _BLOCK)

    def act_mul(args: ActMulArgs) -> Tensor:
        x = args.x
        out = torch.empty(x.shape[0], op.size, dtype=dtype, device=x.device)
        if len(x):
            grid = (len(x), blocks)
            act_mul_kernel[grid](x, out, op.size, x.stride(0), ACTIVATION=op.activation, BLOCK=_BLOCK, num_warps=4)
        return out

    return act_mul


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.activation import act_mul_kernel

    cases = [("silu", word) for word in FLOATS.values()] + [("gelu", "bf16"), ("gelu_tanh", "bf16")]
    return [
        Build(
            kernel=act_mul_kernel,
            label=f"act_mul {activation} {word}",
            signature={"x": f"*{word}", "out": f"*{word}", "size": "i32", "x_stride": "i32"},
            constexprs={"ACTIVATION": activation, "BLOCK": _BLOCK},
            divisible=("x", "out", "size", "x_stride"),
        )
        for activation, word in cases
    ]


register(
    "act_mul",
    Kernel(refuse=lambda op, target: refuse_form(op), bind=_bind, builds=_builds, verdict=invariant),
)
