"""Contract operations bound to kernels: each class bakes in what is static and takes the operation's record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    ApplyTokenBitmaskArgs,
    ApplyTokenBitmaskOp,
    AttentionArgs,
    AttentionOp,
    Determinism,
    EmbedArgs,
    EmbedOp,
    KvWriteArgs,
    KvWriteOp,
    LinearArgs,
    LinearOp,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    ReduceNormArgs,
    ReduceNormOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
    SampleArgs,
    SampleOp,
)
from core_cpu import kernels
from core_cpu.blocks import ExportBlocks, ImportBlocks, MoveTokens, Planes
from core_cpu.weights import CpuPacked

__all__ = ["KERNELS"]

_FIXED_SPLIT = 512
"""Keys between splits of a long stream where a row's bits may not depend on the batch."""


class KvWrite:
    """kv_write."""

    def __init__(self, op: KvWriteOp) -> None:
        self._planes = Planes(op.v_head_dim)

    def __call__(self, args: KvWriteArgs) -> None:
        assert args.value is not None
        kernels.kv_write(args.key, args.value, self._planes.of(args.cache), args.plan.slots)


class Attention:
    """attention over the paged cache."""

    def __init__(self, op: AttentionOp) -> None:
        self._planes = Planes(op.v_head_dim)
        self._kernel = _attention_kernel(op)

    def __call__(self, args: AttentionArgs) -> Tensor:
        plan = args.plan
        assert args.cache is not None
        return self._kernel.paged(
            args.query,
            self._planes.of(args.cache),
            plan.query_start_loc,
            plan.seq_lens,
            plan.block_table,
            sinks=args.sinks,
            lse=args.lse,
        )


class RaggedAttention:
    """attention over the step's own keys."""

    def __init__(self, op: AttentionOp) -> None:
        self._kernel = _attention_kernel(op)

    def __call__(self, args: AttentionArgs) -> Tensor:
        assert args.key is not None and args.value is not None
        starts = args.plan.query_start_loc
        return self._kernel.ragged(args.query, args.key, args.value, starts, starts, sinks=args.sinks, lse=args.lse)


class Linear:
    """linear, for dense and quantized weights alike."""

    def __init__(self, op: LinearOp) -> None:
        self._out_dtype = torch_dtype(op.out_dtype)
        self._invariant = op.determinism >= Determinism.D2

    def __call__(self, args: LinearArgs) -> Tensor:
        assert isinstance(args.x, Tensor) and isinstance(args.weight, CpuPacked)
        return kernels.linear(
            args.x, args.weight.weight, args.bias, out_dtype=self._out_dtype, invariant=self._invariant
        )


class Embed:
    """embed."""

    def __init__(self, op: EmbedOp) -> None:
        self._dtype = torch_dtype(op.dtype)
        self._multiplier = float(torch.tensor(op.multiplier, dtype=self._dtype))

    def __call__(self, args: EmbedArgs) -> Tensor:
        assert isinstance(args.weight, CpuPacked)
        return kernels.embed(args.token_ids, args.weight.weight, out_dtype=self._dtype, scale=self._multiplier)


class RmsNorm:
    """rms_norm of any leading shape."""

    def __init__(self, op: RmsNormOp) -> None:
        self._eps, self._offset = op.eps, op.weight_offset

    def __call__(self, args: RmsNormArgs) -> Tensor | tuple[Tensor, Tensor]:
        x, residual = args.x, args.residual
        shape = x.shape
        if x.dim() == 1 or x.dim() > 3 or (residual is not None and x.dim() != 2):
            x = x.reshape(-1, shape[-1])
            residual = None if residual is None else residual.reshape(-1, shape[-1])
        y = kernels.rms_norm(x, args.weight, self._eps, offset=self._offset, residual=residual).view(shape)
        return y if residual is None else (y, residual.view(shape))


class ReduceNorm:
    """reduce_norm on one rank: the branch's own norm, then residual and norm in one pass."""

    def __init__(self, op: ReduceNormOp) -> None:
        self._eps, self._offset = op.eps, op.weight_offset

    def __call__(self, args: ReduceNormArgs) -> tuple[Tensor, Tensor]:
        x, residual = args.partial, args.residual
        if args.post_weight is not None:
            x = kernels.rms_norm(x, args.post_weight, self._eps, offset=self._offset, out=x)
        y = kernels.rms_norm(x, args.weight, self._eps, offset=self._offset, residual=residual)
        return y, residual


class ActMul:
    """act_mul."""

    def __init__(self, op: ActMulOp) -> None:
        self._activation = op.activation

    def __call__(self, args: ActMulArgs) -> Tensor:
        return kernels.act_mul(args.x, self._activation)


class Rope:
    """rope, in place."""

    def __init__(self, op: RopeOp) -> None:
        self._interleaved = op.interleaved

    def __call__(self, args: RopeArgs) -> tuple[Tensor, Tensor]:
        kernels.rope(args.query, args.positions, args.cos_sin, interleaved=self._interleaved)
        kernels.rope(args.key, args.positions, args.cos_sin, interleaved=self._interleaved)
        return args.query, args.key


class QkNormRopeWrite:
    """qk_norm_rope_write, in place on query and key."""

    def __init__(self, op: QkNormRopeWriteOp) -> None:
        self._planes = Planes(op.v_head_dim)
        self._eps, self._offset = op.eps, op.weight_offset
        self._interleaved = op.interleaved

    def __call__(self, args: QkNormRopeWriteArgs) -> tuple[Tensor, Tensor]:
        query, key = args.query, args.key
        if args.q_weight is not None and args.k_weight is not None:
            kernels.rms_norm(query, args.q_weight, self._eps, offset=self._offset, out=query)
            kernels.rms_norm(key, args.k_weight, self._eps, offset=self._offset, out=key)
        kernels.rope(query, args.positions, args.cos_sin, interleaved=self._interleaved)
        kernels.rope(key, args.positions, args.cos_sin, interleaved=self._interleaved)
        kernels.kv_write(key, args.value, self._planes.of(args.cache), args.plan.slots)
        return query, key


class Sample:
    """sample."""

    def __init__(self, op: SampleOp) -> None:
        pass

    def __call__(self, args: SampleArgs) -> Tensor:
        return kernels.sample(
            args.logits, args.temperature, args.seeds, args.positions, args.top_k, args.top_p, args.min_p
        )


class ApplyTokenBitmask:
    """apply_token_bitmask."""

    def __init__(self, op: ApplyTokenBitmaskOp) -> None:
        pass

    def __call__(self, args: ApplyTokenBitmaskArgs) -> None:
        kernels.token_bitmask(args.logits, args.bitmask)


def _attention(op: AttentionOp) -> Callable[[AttentionArgs], Tensor]:
    return RaggedAttention(op) if op.has("ragged") else Attention(op)


def _attention_kernel(op: AttentionOp) -> kernels.AttentionKernel:
    return kernels.AttentionKernel(
        op.num_heads,
        torch_dtype(op.dtype),
        op.scale,
        causal=op.causal,
        window=op.window,
        softcap=op.softcap,
        split_keys=_FIXED_SPLIT if op.determinism >= Determinism.D2 else 0,
    )


KERNELS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "act_mul": ActMul,
    "apply_token_bitmask": ApplyTokenBitmask,
    "attention": _attention,
    "embed": Embed,
    "export_blocks": ExportBlocks,
    "import_blocks": ImportBlocks,
    "kv_write": KvWrite,
    "linear": Linear,
    "move_tokens": MoveTokens,
    "qk_norm_rope_write": QkNormRopeWrite,
    "reduce_norm": ReduceNorm,
    "rms_norm": RmsNorm,
    "rope": Rope,
    "sample": Sample,
}
"""Operation name to what makes its callable."""
