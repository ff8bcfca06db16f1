"""gated_delta: short queries token by token, long ones in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.backend import Capture, Verdict, torch_dtype
from core.backend.ops import Determinism, GatedDeltaArgs, GatedDeltaOp
from core_triton.ops.recurrent import SLOT_SIGNATURE, num_short, slots_of
from core_triton.ops.refusals import FLOATS, refuse_form
from core_triton.ops.rows import power_of_two
from core_triton.registry import Build, Kernel, register
from core_triton.target import Target
from core_triton.tuning import Tuning, tunings

__all__: list[str] = []

_MOST_DIM = 256


def _constants(op: GatedDeltaOp, tuning: Tuning) -> dict[str, Any]:
    found = {
        "GROUP": op.num_v_heads // op.num_k_heads,
        "K_DIM": op.k_dim,
        "V_DIM": op.v_dim,
        "NORM": op.qk_l2norm,
        "BLOCK_K": max(16, power_of_two(op.k_dim)),
        "BLOCK_V": max(16, min(tuning["BLOCK_V"], power_of_two(op.v_dim))),
    }
    return found | {name: tuning[name] for name in ("CHUNK", "PIECE") if name in tuning.sizes}


class _GatedDelta:
    """The bound operation."""

    def __init__(self, op: GatedDeltaOp, target: Target) -> None:
        self._op, self._dtype = op, torch_dtype(op.dtype)
        found = tunings("recurrent", target)
        self._step, self._chunk = found["step"], found["chunk"]
        # However a prompt is cut, a token's bits are those of one token after the other.
        self._by_token = op.determinism >= Determinism.D3

    def __call__(self, args: GatedDeltaArgs) -> Tensor:
        from core_triton.kernels.gated_delta import gated_delta_chunk_kernel, gated_delta_kernel

        op, requests = self._op, args.plan.batch.num_reqs
        shape = (args.value.shape[0], op.num_v_heads, op.v_dim)
        out = torch.empty(shape, dtype=self._dtype, device=args.value.device)
        short = requests if self._by_token else num_short(args.plan)
        if short:
            self._launch(gated_delta_kernel, args, out, self._step, 0, short)
        if short < requests:
            self._launch(gated_delta_chunk_kernel, args, out, self._chunk, short, requests)
        return out

    def _launch(self, kernel: Any, args: GatedDeltaArgs, out: Tensor, tuning: Tuning, first: int, last: int) -> None:
        op, plane = self._op, args.cache[0]
        sizes = _constants(op, tuning)
        starts, slots, accepted, checkpoints, constants = slots_of(args.plan, first)
        kernel[(last - first, op.num_v_heads, -(-op.v_dim // sizes["BLOCK_V"]))](
            *(args.query, args.key, args.value, args.gate, args.beta, plane, out),
            *(starts, slots, accepted, checkpoints, slots.shape[1], op.scale),
            *(*args.query.stride()[:2], *args.key.stride()[:2], *args.value.stride()[:2]),
            *(args.gate.stride(0), args.beta.stride(0), *plane.stride()[:3], slots.stride(0)),
            **sizes,
            **constants,
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
        )


def _refuse(op: GatedDeltaOp, target: Target) -> str:
    return refuse_form(op) or (f"no kernel for keys of more than {_MOST_DIM}" if op.k_dim > _MOST_DIM else "")


def _verdict(op: GatedDeltaOp, target: Target) -> Verdict:
    return Verdict.native(capture=Capture.UNIFORM, determinism=max(op.determinism, Determinism.D2))


_STRIDES = (
    *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride", "g_stride", "b_stride"),
    *("slot_stride", "head_stride", "row_stride", "table_stride"),
)


def _builds(target: Target) -> Sequence[Build]:
    from core_triton.kernels.gated_delta import gated_delta_chunk_kernel, gated_delta_kernel

    def build(label: str, kernel: Any, word: str, op: GatedDeltaOp, tuning: Tuning) -> Build:
        return Build(
            kernel=kernel,
            label=label,
            signature={
                **dict.fromkeys(("query", "key", "value", "out"), f"*{word}"),
                **dict.fromkeys(("gate", "beta", "plane"), "*fp32"),
                **SLOT_SIGNATURE,
                "num_slots": "i32",
                "scale": "fp32",
                **dict.fromkeys(_STRIDES, "i32"),
            },
            constexprs={**_constants(op, tuning), "CHECKPOINTS": True},
            num_warps=tuning.num_warps,
            num_stages=tuning.num_stages,
            divisible=("query", "key", "value", "plane", "out", *_STRIDES[:6], *_STRIDES[8:11]),
        )

    found, tables = [], tunings("recurrent", target)
    for dtype, word in FLOATS.items():
        op = GatedDeltaOp(dtype=dtype, num_k_heads=16, num_v_heads=32, k_dim=128, v_dim=128, scale=1.0)
        found.append(build(f"step {word}", gated_delta_kernel, word, op, tables["step"]))
        found.append(build(f"chunk {word}", gated_delta_chunk_kernel, word, op, tables["chunk"]))
    return found


register("gated_delta", Kernel(refuse=_refuse, bind=_GatedDelta, builds=_builds, verdict=_verdict))
