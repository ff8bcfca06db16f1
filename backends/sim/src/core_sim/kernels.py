"""The simulated chip's operations. They take what the chip takes and raise SimFault on anything else."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.backend import KVLayout, Plan, Plane, canonical_layout, torch_dtype
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    AttentionArgs,
    AttentionOp,
    EmbedArgs,
    EmbedOp,
    ExportBlocksArgs,
    ExportBlocksOp,
    ImportBlocksArgs,
    ImportBlocksOp,
    KvWriteArgs,
    KvWriteOp,
    LinearArgs,
    LinearOp,
    RmsNormArgs,
    RmsNormOp,
)
from core.spec import CacheKind, KVCacheSpec

__all__ = ["BLOCK_SIZE", "KERNELS", "MAX_DECODE_QUERY", "SimFault", "SimPlan", "require", "sim_layout"]

BLOCK_SIZE = 128
"""Tokens a KV block; the chip's cache unit knows no other size."""
MAX_DECODE_QUERY = 16
"""Query tokens that a decode request may have."""


class SimFault(RuntimeError):
    """The chip was handed something that it cannot take; on a real one this would be a device fault."""


def require(ok: bool, what: str) -> None:
    """Raises SimFault unless `ok`."""
    if not ok:
        raise SimFault(what)


@dataclass(slots=True, kw_only=True)
class SimPlan(Plan):
    """The host lists that the attention unit is launched with.

    Args:
        query_ends: Cumulative query lengths; the last one equals the step's tokens.
        kv_lens: Keys of each request, exact.
    """

    query_ends: list[int] = field(default_factory=list)
    kv_lens: list[int] = field(default_factory=list)


def sim_layout(spec: KVCacheSpec, block_size: int) -> KVLayout:
    """Keys as [heads, dim, tokens], values as [heads, tokens, dim]; what the chip has no unit for stays canonical."""
    if spec.kind not in (CacheKind.FULL, CacheKind.SLIDING) or not spec.v_head_dim:
        return canonical_layout(spec, block_size)
    heads = spec.num_kv_heads
    key, value = (heads, spec.head_dim, block_size), (heads, block_size, spec.v_head_dim)
    planes = [
        Plane(name="key", dtype=spec.dtype, block_shape=key, head_axis=0),
        Plane(name="value", dtype=spec.dtype, block_shape=value, head_axis=0),
    ]
    layout_id = f"sim/{block_size}/{heads}x{spec.head_dim}+{spec.v_head_dim}/{spec.dtype}"
    return KVLayout(id=layout_id, planes=tuple(planes), block_size=block_size)


class KvWrite:
    """kv_write: scatters tokens into the transposed planes."""

    def __init__(self, op: KvWriteOp) -> None:
        self.op = op

    def __call__(self, args: KvWriteArgs) -> None:
        require(isinstance(args.plan, SimPlan), "the plan was not made by this chip's plan()")
        require(args.value is not None, "the cache unit writes keys and values together")
        slots = args.plan.slots
        require(slots.dtype == torch.int32 and slots.shape[0] == args.key.shape[0], "slots must be int32, one a token")
        kept = torch.nonzero(slots >= 0).flatten()
        block, offset = slots[kept].long() // BLOCK_SIZE, slots[kept].long() % BLOCK_SIZE
        require(bool((block > 0).all()), "a token was written to the reserved block 0")
        keys, values = args.cache
        assert args.value is not None
        keys[block, :, :, offset] = args.key[kept].to(keys.dtype)
        values[block, :, offset] = args.value[kept].to(values.dtype)


class Attention:
    """attention: one launch for the whole step, driven by host lists."""

    def __init__(self, op: AttentionOp) -> None:
        self.op = op

    def __call__(self, args: AttentionArgs) -> Tensor:
        plan = args.plan
        require(isinstance(plan, SimPlan), "the plan was not made by this chip's plan()")
        assert isinstance(plan, SimPlan)
        require(args.cache is not None, "there is no ragged mode")
        require(args.query.stride(-1) == 1, "queries must be contiguous in the last dim")
        require(plan.query_ends[-1] == args.query.shape[0], "the last cumulative length must equal the tokens")
        out = torch.full((*args.query.shape[:2], self.op.v_head_dim), math.nan, dtype=args.query.dtype)
        start = 0
        for request, (end, kv_len) in enumerate(zip(plan.query_ends, plan.kv_lens, strict=True)):
            padding = end > start and int(plan.block_table[request, (kv_len - 1) // BLOCK_SIZE]) == 0
            out[start:end] = 0.0 if padding else self._one(args, plan, request, slice(start, end), kv_len)
            start = end
        return out

    def _one(self, args: AttentionArgs, plan: SimPlan, request: int, tokens: slice, kv_len: int) -> Tensor:
        op = self.op
        query = args.query[tokens].float()
        num_queries = query.shape[0]
        first_query = kv_len - num_queries
        first_block = max(0, first_query - op.window + 1) // BLOCK_SIZE if op.window else 0
        last_block = -(-kv_len // BLOCK_SIZE)
        ids = plan.block_table[request, first_block:last_block].long()
        assert args.cache is not None
        keys, values = args.cache
        base = first_block * BLOCK_SIZE
        key = keys[ids].permute(1, 2, 0, 3).flatten(2)[:, :, : kv_len - base].float()
        value = values[ids].permute(1, 0, 2, 3).flatten(1, 2)[:, : kv_len - base].float()
        repeat = op.num_heads // op.num_kv_heads
        logits = query.transpose(0, 1) @ key.repeat_interleave(repeat, dim=0) * op.scale
        position = torch.arange(first_query, kv_len)[:, None]
        at = torch.arange(base, kv_len)[None, :]
        seen = at <= position
        if op.window:
            seen &= at > position - op.window
        weights = torch.softmax(logits.masked_fill(~seen, -math.inf), dim=-1)
        # Keys that no query of the request sees may be NaN: 0 * NaN must not reach the sum.
        value = torch.where(seen.any(0)[None, :, None], value, 0.0).repeat_interleave(repeat, dim=0)
        return (weights @ value).transpose(0, 1).to(args.query.dtype)


class Linear:
    """linear: dense weights in the model's type, accumulated in float32."""

    def __init__(self, op: LinearOp) -> None:
        self.out_dtype = torch_dtype(op.out_dtype)

    def __call__(self, args: LinearArgs) -> Tensor:
        require(isinstance(args.x, Tensor) and args.x.stride(-1) == 1, "x must be a tensor, contiguous in the last dim")
        assert isinstance(args.x, Tensor)
        out = args.x.float() @ args.weight.tensors()["weight"].float().T
        if args.bias is not None:
            out = out + args.bias.float()
        return out.to(self.out_dtype)


class RmsNorm:
    """rms_norm, with the residual added first where asked for."""

    def __init__(self, op: RmsNormOp) -> None:
        self.op = op

    def __call__(self, args: RmsNormArgs) -> Tensor | tuple[Tensor, Tensor]:
        x = args.x
        if args.residual is not None:
            x = x + args.residual
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.op.eps)
        y = (wide * scale * (args.weight.float() + self.op.weight_offset)).to(x.dtype)
        return y if args.residual is None else (y, x)


class ActMul:
    """act_mul: the SiLU gate, all that the chip's vector unit has."""

    def __init__(self, op: ActMulOp) -> None:
        self.size = op.size

    def __call__(self, args: ActMulArgs) -> Tensor:
        gate, up = args.x.float().split(self.size, dim=-1)
        gated: Tensor = gate * torch.sigmoid(gate) * up
        return gated.to(args.x.dtype)


class Embed:
    """embed: gathers rows."""

    def __init__(self, op: EmbedOp) -> None:
        self.op = op

    def __call__(self, args: EmbedArgs) -> Tensor:
        weight = args.weight.tensors()["weight"]
        ids = args.token_ids.long()
        require(bool(((ids >= 0) & (ids < weight.shape[0])).all()), "a token id is outside the embedding")
        rows: Tensor = weight[ids] * torch.tensor(self.op.multiplier, dtype=weight.dtype)
        return rows


class ExportBlocks:
    """export_blocks: undoes the private layout."""

    def __init__(self, op: ExportBlocksOp) -> None:
        pass

    def __call__(self, args: ExportBlocksArgs) -> tuple[Tensor, ...]:
        keys, values = (plane[args.block_ids.long()] for plane in args.cache)
        return keys.permute(0, 3, 1, 2).flatten(0, 1).contiguous(), values.transpose(1, 2).flatten(0, 1).contiguous()


class ImportBlocks:
    """import_blocks: brings token-major blocks into the private layout."""

    def __init__(self, op: ImportBlocksOp) -> None:
        pass

    def __call__(self, args: ImportBlocksArgs) -> None:
        ids, (keys, values) = args.block_ids.long(), args.cache
        key, value = (plane.unflatten(0, (-1, BLOCK_SIZE)) for plane in args.planes)
        keys[ids] = key.permute(0, 2, 3, 1)
        values[ids] = value.transpose(1, 2)


KERNELS = {
    "act_mul": ActMul,
    "attention": Attention,
    "embed": Embed,
    "export_blocks": ExportBlocks,
    "import_blocks": ImportBlocks,
    "kv_write": KvWrite,
    "linear": Linear,
    "rms_norm": RmsNorm,
}
"""What the chip does itself."""
