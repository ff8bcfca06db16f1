"""Kernels that are right and round, order or search in another way than the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend import torch_dtype
from core.backend.ops import (
    ActMulArgs,
    ActMulOp,
    KvWriteArgs,
    KvWriteOp,
    LinearArgs,
    LinearOp,
    MergeLseArgs,
    MergeLseOp,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    ReduceNormArgs,
    ReduceNormOp,
    RmsNormArgs,
    RmsNormOp,
    SampleArgs,
    SampleOp,
)
from core.backend.philox import GUMBEL_STREAM, uniform
from core.backend.reference.dense import rotate
from core.backend.reference.sampling import tempered
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.plain_attention import Form, plain_attention
from core_conformance.mutants.variant import Honest
from core_conformance.subject import oracle

__all__ = ["HONEST"]


def _product(multiply: Callable[[Tensor, Tensor], Tensor]) -> Maker:
    """A dense product of float32 x [T, K] and weight [N, K], the bias and one rounding."""

    def make(op: LinearOp) -> Callable[[LinearArgs], Tensor]:
        if op.scheme != "none":
            return oracle(op)

        def linear(args: LinearArgs) -> Tensor:
            assert isinstance(args.x, Tensor)
            total = multiply(args.x.float(), args.weight.dense().float())
            if args.bias is not None:
                total = total + args.bias.float()
            return total.to(torch_dtype(op.out_dtype))

        return linear

    return make


def _split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Four runs of columns apart, then over the runs."""
    pairs = zip(x.chunk(4, dim=1), weight.chunk(4, dim=1), strict=True)
    return sum((a @ b.T for a, b in pairs), torch.zeros(len(x), len(weight)))


def _pairwise(x: Tensor, weight: Tensor) -> Tensor:
    """Halves of the columns, down to eight, each half's sum added to the other's."""
    count = x.shape[1]
    if count <= 8:
        return (x[:, None] * weight).sum(-1)
    half = count // 2
    return _pairwise(x[:, :half], weight[:, :half]) + _pairwise(x[:, half:], weight[:, half:])


def _scale(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm_weight_first(op: RmsNormOp) -> Callable[[RmsNormArgs], Any]:
    """The weight is multiplied by the row's scale, and x by both."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        values = x.float()
        return (values * ((weight.float() + op.weight_offset) * _scale(values, op.eps))).to(torch_dtype(op.dtype))

    def rms_norm(args: RmsNormArgs) -> Any:
        if args.residual is None:
            return norm(args.x, args.weight)
        total = (args.x.float() + args.residual.float()).to(args.x.dtype)
        return norm(total, args.weight), total

    return rms_norm


def _fused_reduce_norm(op: ReduceNormOp) -> Callable[[ReduceNormArgs], Any]:
    """Post norm, residual and norm in one pass: the branch is never rounded on its own."""
    if op.world > 1 or op.out_formats:
        return oracle(op)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * _scale(x, op.eps) * (weight.float() + op.weight_offset)

    def reduce_norm(args: ReduceNormArgs) -> tuple[Tensor, Tensor]:
        branch = args.partial.float()
        if args.post_weight is not None:
            branch = norm(branch, args.post_weight)
        total = (branch + args.residual.float()).to(args.residual.dtype)
        return norm(total.float(), args.weight).to(total.dtype), total

    return reduce_norm


def _fused_write(op: QkNormRopeWriteOp) -> Callable[[QkNormRopeWriteArgs], Any]:
    """Norm, rope and cache write in one pass: rounded once, at the end."""
    write = oracle(
        KvWriteOp(
            dtype=op.dtype,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            v_head_dim=op.v_head_dim,
            kv_dtype=op.kv_dtype,
        )
    )

    def turned(x: Tensor, weight: Tensor | None, angles: Tensor) -> Tensor:
        values = x.float()
        if weight is not None:
            values = values * _scale(values, op.eps) * (weight.float() + op.weight_offset)
        return rotate(values, angles, op.rotary_dim, op.interleaved).to(x.dtype)

    def qk_norm_rope_write(args: QkNormRopeWriteArgs) -> tuple[Tensor, Tensor]:
        angles = args.cos_sin[args.positions.long()]
        query, key = turned(args.query, args.q_weight, angles), turned(args.key, args.k_weight, angles)
        write(KvWriteArgs(key=key, value=args.value, cache=args.cache, plan=args.plan))
        return query, key

    return qk_norm_rope_write


def _by_sigmoid(op: ActMulOp) -> Callable[[ActMulArgs], Tensor]:
    """Tanh and exponential functions written as others of the same value."""

    def gate(x: Tensor) -> Tensor:
        if op.activation == "silu":
            return x / (1 + torch.exp(-x))
        if op.activation == "gelu":
            tail: Tensor = torch.special.erfc(-x / math.sqrt(2.0))
            return 0.5 * x * tail
        cubic = x + 0.044715 * x * x * x
        made: Tensor = x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * cubic)
        return made

    def act_mul(args: ActMulArgs) -> Tensor:
        x = args.x.float()
        return (gate(x[:, : op.size]) * x[:, op.size :]).to(torch_dtype(op.dtype))

    return act_mul


def _merge_in_powers_of_2(op: MergeLseOp) -> Callable[[MergeLseArgs], tuple[Tensor, Tensor]]:
    """One part after the other joins what was merged before it."""

    def merge_lse(args: MergeLseArgs) -> tuple[Tensor, Tensor]:
        lses = args.lses.float() * math.log2(math.e)
        out = torch.zeros(args.outs.shape[1:])
        total = torch.full(lses.shape[1:], -math.inf)
        for part, lse in zip(args.outs.float(), lses, strict=True):
            higher = torch.maximum(total, lse)
            base = torch.where(higher == -math.inf, 0.0, higher)
            old, new = torch.exp2(total - base), torch.exp2(lse - base)
            weight = old + new
            part = torch.where(new[..., None] > 0, part, 0.0)
            out = (out * old[..., None] + part * new[..., None]) / torch.where(weight == 0, 1.0, weight)[..., None]
            total = base + torch.log2(weight)
        return out.to(torch_dtype(op.dtype)), total * math.log(2.0)

    return merge_lse


def _by_threshold(op: SampleOp) -> Callable[[SampleArgs], Tensor]:
    """No sort: thresholds are searched by bisection, and the draw is a race of exponentials."""

    def sample(args: SampleArgs) -> Tensor:
        greedy = args.logits.argmax(-1)
        z = tempered(args.logits, args.temperature)
        probs = _race_weights(z, args)
        rows, ids = torch.where(probs > 0)
        u = uniform(args.seeds[rows], args.positions[rows].long(), ids, GUMBEL_STREAM)
        speed = torch.zeros_like(probs)
        speed[rows, ids] = probs[rows, ids] / -torch.log(u)
        return torch.where(args.temperature > 0, speed.argmax(-1), greedy).to(torch.int32)

    return sample


def _race_weights(z: Tensor, args: SampleArgs) -> Tensor:
    """Probabilities of the tokens that may be drawn, 0 for the others."""
    if args.top_k is not None:
        z = torch.where(_of_the_k_largest(z, args.top_k), z, -math.inf)
    probs = z.softmax(-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if args.top_p is not None:
        limit = args.top_p[:, None]
        low, high = torch.zeros_like(limit), probs.amax(-1, keepdim=True)
        for _ in range(60):
            middle = (low + high) / 2
            enough = torch.where(probs >= middle, probs, 0.0).sum(-1, keepdim=True) >= limit
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
        keep &= (probs >= low) | (limit >= 1)
    if args.min_p is not None:
        keep &= probs >= args.min_p[:, None] * probs.amax(-1, keepdim=True)
    return torch.where(keep, probs, 0.0)


def _of_the_k_largest(z: Tensor, top_k: Tensor) -> Tensor:
    """Exactly top_k tokens a row, all where it is 0; of equals the lower ids."""
    count = torch.where(top_k > 0, top_k, z.shape[1]).clamp(max=z.shape[1]).long()
    edge = torch.stack([row.kthvalue(z.shape[1] + 1 - int(k)).values for row, k in zip(z, count, strict=True)])[:, None]
    missing = count[:, None] - (z > edge).sum(-1, keepdim=True)
    equal = z == edge
    return (z > edge) | (equal & (equal.cumsum(-1) <= missing))


_MODEL = ("L1", "L2", "L3/greedy")


def _kernel(name: str, makers: dict[str, Maker], heads: tuple[str, ...] = _MODEL) -> Honest:
    return Honest(name=name, makers=makers, heads=heads)


HONEST: tuple[Honest, ...] = (
    _kernel("split-K sums", {"linear": _product(_split_k)}),
    _kernel("pairwise sums", {"linear": _product(_pairwise)}),
    _kernel("P in half precision", {"attention": plain_attention(Form(half_weights=True))}),
    _kernel("small tiles, newest first", {"attention": plain_attention(Form(tile=lambda _: 7, newest_first=True))}),
    _kernel("softmax in powers of 2", {"attention": plain_attention(Form(tile=lambda _: 16, base2=True))}),
    _kernel("norm's weight first", {"rms_norm": _norm_weight_first}),
    _kernel("fused norms, rope and write", {"reduce_norm": _fused_reduce_norm, "qk_norm_rope_write": _fused_write}),
    _kernel("activations by other functions", {"act_mul": _by_sigmoid}),
    _kernel("parts merged one by one in powers of 2", {"merge_lse": _merge_in_powers_of_2}, ("L1",)),
    _kernel("sampling by threshold", {"sample": _by_threshold}, ("L1", "L3/greedy", "L3/seeds")),
)
