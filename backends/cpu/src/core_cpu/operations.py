"""Contract operations bound to kernels: each class bakes in what is static and takes the operation's record.

Those that a decoder calls in every layer pass addresses on themselves: the checks of `core_cpu.kernels` would cost more
than some of the kernels do. What is asserted here the contract promises.
"""

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
    OpSpec,
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
from core.backend.schemes import GGUF_BLOCKS
from core.spec import DType
from core_cpu import _kernels, kernels
from core_cpu.blocks import ExportBlocks, ImportBlocks, MoveTokens, Planes
from core_cpu.plan import CpuPlan
from core_cpu.tape_memory import empty
from core_cpu.weights import CpuPacked

__all__ = ["KERNELS", "activation_format"]

_FIXED_SPLIT = 512
"""Keys between splits of a long stream where a row's bits may not depend on the batch."""
_MAX_INT16_DIM = 512
"""Head dim up to which sums of products of integers fit into 32 bits."""


class KvWrite:
    """kv_write."""

    def __init__(self, op: KvWriteOp) -> None:
        self._planes = Planes(op.v_head_dim)

    def __call__(self, args: KvWriteArgs) -> None:
        assert args.value is not None and isinstance(args.plan, CpuPlan)
        assert args.plan.num_slots <= args.key.shape[0], "fewer tokens than slots"
        kernels.kv_write_planned(args.key, args.value, self._planes.of(args.cache), args.plan.handle)


class Attention:
    """attention over the paged cache."""

    def __init__(self, op: AttentionOp) -> None:
        self._planes = Planes(op.v_head_dim)
        self._run = _attention_kernel(op).handle.planned
        self._dtype, self._heads, self._dim, self._v_dim = (
            torch_dtype(op.dtype),
            op.num_heads,
            op.head_dim,
            op.v_head_dim,
        )

    def __call__(self, args: AttentionArgs) -> Tensor:
        query, plan, sinks, lse = args.query, args.plan, args.sinks, args.lse
        assert args.cache is not None and isinstance(plan, CpuPlan)
        assert query.shape[1:] == (self._heads, self._dim) and query.dtype == self._dtype and query.stride(2) == 1
        out = empty((query.shape[0], self._heads, self._v_dim), self._dtype)
        self._run(
            self._planes.of(args.cache).handle,
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            out.data_ptr(),
            self._heads * self._v_dim,
            self._v_dim,
            plan.handle,
            0 if sinks is None else _float32(sinks),
            0 if lse is None else _float32(lse),
        )
        return out


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
        self._in_dtype, self._out_dtype = torch_dtype(op.dtype), torch_dtype(op.out_dtype)
        self._codes = kernels.DTYPE_CODES[self._in_dtype], kernels.DTYPE_CODES[self._out_dtype]
        self._in_features, self._out_features = op.in_features, op.out_features
        self._invariant = op.determinism >= Determinism.D2
        self._int8 = activation_format(op) is not None

    def __call__(self, args: LinearArgs) -> Tensor:
        x, packed, bias = args.x, args.weight, args.bias
        assert isinstance(x, Tensor) and isinstance(packed, CpuPacked)
        assert x.dtype == self._in_dtype and x.shape[1] == self._in_features and x.stride(1) == 1
        rows, columns = x.shape[0], self._out_features
        out = empty((rows, columns), self._out_dtype)
        _kernels.linear(
            packed.weight.handle,
            x.data_ptr(),
            self._codes[0],
            rows,
            x.stride(0),
            out.data_ptr(),
            self._codes[1],
            columns,
            0 if bias is None else bias.data_ptr(),
            0 if bias is None else kernels.DTYPE_CODES[bias.dtype],
            self._invariant,
            self._int8,
        )
        return out


def activation_format(op: OpSpec) -> str | None:
    """What the kernel rounds plain activations to, where it may choose."""
    if not getattr(op, "quantize_activations", False):
        return None
    if isinstance(op, AttentionOp):
        plain = (op.dtype, op.kv_dtype) == (DType.BFLOAT16, DType.BFLOAT16) and op.head_dim <= _MAX_INT16_DIM
        return "int16_row" if plain and kernels.rounds_attention() else None
    assert isinstance(op, LinearOp)
    known = op.scheme in GGUF_BLOCKS or (op.scheme == "int8" and op.in_features % 32 == 0)
    return "int8_block32" if known else None


class Embed:
    """embed."""

    def __init__(self, op: EmbedOp) -> None:
        self._dtype = torch_dtype(op.dtype)
        self._multiplier = float(torch.tensor(op.multiplier, dtype=self._dtype))

    def __call__(self, args: EmbedArgs) -> Tensor:
        assert isinstance(args.weight, CpuPacked)
        return kernels.embed(args.token_ids, args.weight.weight, out_dtype=self._dtype, scale=self._multiplier)


class RowNorm:
    """The norm of rows [t, dim], as the operations below share it.

    Args:
        dtype: Type of x.
        dim: Elements of a row.
        eps: Added to the mean square.
        offset: Added to the weight.
    """

    __slots__ = ("_code", "_dim", "_dtype", "_eps", "_offset")

    def __init__(self, dtype: DType, dim: int, eps: float, offset: float) -> None:
        self._dtype, self._dim, self._eps, self._offset = torch_dtype(dtype), dim, eps, offset
        self._code = kernels.DTYPE_CODES[self._dtype]

    def __call__(self, x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor | None = None) -> Tensor:
        """The norm of x, or of x + residual, which then lies in `residual`."""
        rows, dim = x.shape
        assert x.dtype == self._dtype and dim == self._dim and x.stride(1) == 1 and weight.shape == (dim,)
        out = empty((rows, dim), self._dtype) if out is None else out
        sum_at, sum_stride = 0, 0
        if residual is not None:
            assert residual.dtype == self._dtype and residual.shape == x.shape and residual.stride(1) == 1
            sum_at, sum_stride = residual.data_ptr(), residual.stride(0)
        weight_code = kernels.DTYPE_CODES[weight.dtype]
        _kernels.rms_norm(
            x.data_ptr(), x.stride(0), 0, out.data_ptr(), out.stride(0), 0, weight.data_ptr(), self._code, weight_code,
            rows, 1, dim, self._eps, self._offset, sum_at, sum_stride, sum_at, sum_stride,
        )  # fmt: skip
        return out


class RmsNorm:
    """rms_norm of any leading shape."""

    def __init__(self, op: RmsNormOp) -> None:
        self._eps, self._offset = op.eps, op.weight_offset
        self._rows = RowNorm(op.dtype, op.dim, op.eps, op.weight_offset)

    def __call__(self, args: RmsNormArgs) -> Tensor | tuple[Tensor, Tensor]:
        x, residual = args.x, args.residual
        if x.dim() == 3 and residual is None:
            return kernels.rms_norm(x, args.weight, self._eps, offset=self._offset)
        shape = x.shape
        if x.dim() != 2:
            x = x.reshape(-1, shape[-1])
            residual = None if residual is None else residual.reshape(-1, shape[-1])
        y = self._rows(x, args.weight, residual).view(shape)
        return y if residual is None else (y, residual.view(shape))


class ReduceNorm:
    """reduce_norm on one rank: the branch's own norm, then residual and norm in one pass."""

    def __init__(self, op: ReduceNormOp) -> None:
        self._rows = RowNorm(op.dtype, op.dim, op.eps, op.weight_offset)

    def __call__(self, args: ReduceNormArgs) -> tuple[Tensor, Tensor]:
        x, residual = args.partial, args.residual
        if args.post_weight is not None:
            x = self._rows(x, args.post_weight, None, out=x)
        return self._rows(x, args.weight, residual), residual


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
    """qk_norm_rope_write in one call, in place on query and key."""

    def __init__(self, op: QkNormRopeWriteOp) -> None:
        self._planes = Planes(op.v_head_dim)
        self._op, self._dtype = op, torch_dtype(op.dtype)
        self._code = kernels.DTYPE_CODES[self._dtype]

    def __call__(self, args: QkNormRopeWriteArgs) -> tuple[Tensor, Tensor]:
        op, query, key, value, plan = self._op, args.query, args.key, args.value, args.plan
        assert isinstance(plan, CpuPlan) and args.positions.dtype == torch.int32
        assert query.shape[1:] == (op.num_heads, op.head_dim) and key.shape[1:] == (op.num_kv_heads, op.head_dim)
        assert query.dtype == key.dtype == value.dtype == self._dtype
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1 and plan.num_slots <= key.shape[0]
        q_weight, k_weight = args.q_weight, args.k_weight
        weight_code = self._code if q_weight is None else kernels.DTYPE_CODES[q_weight.dtype]
        assert q_weight is None or k_weight is None or q_weight.dtype == k_weight.dtype
        _kernels.qk_norm_rope_write(
            self._planes.of(args.cache).handle,
            query.data_ptr(), query.stride(0), query.stride(1), op.num_heads,
            key.data_ptr(), key.stride(0), key.stride(1),
            value.data_ptr(), value.stride(0), value.stride(1),
            self._code, query.shape[0],
            0 if q_weight is None else q_weight.data_ptr(), 0 if k_weight is None else k_weight.data_ptr(), weight_code,
            op.eps, op.weight_offset, op.rotary_dim, op.interleaved,
            args.positions.data_ptr(), _float32(args.cos_sin), plan.handle,
        )  # fmt: skip
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


def _float32(x: Tensor) -> int:
    assert x.dtype == torch.float32 and x.is_contiguous(), f"float32 and contiguous, not {x.dtype} {x.stride()}"
    return x.data_ptr()


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
        int16=activation_format(op) is not None,
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
