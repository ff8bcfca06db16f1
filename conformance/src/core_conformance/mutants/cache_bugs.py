"""Writing to the paged cache and moving its blocks, with one bug each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import (
    AttentionArgs,
    AttentionOp,
    ImportBlocksArgs,
    KvWriteArgs,
    KvWriteOp,
    QkNormRopeWriteArgs,
    QkNormRopeWriteOp,
    RmsNormArgs,
    RmsNormOp,
    RopeArgs,
    RopeOp,
)
from core_conformance.mutants.planting import after, before
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS", "minus_one_to_slot_zero"]


def _with_slots(args: Any, slots: Tensor) -> Any:
    group = dataclasses.replace(args.plan.group, slots=slots)
    return dataclasses.replace(args, plan=dataclasses.replace(args.plan, group=group))


def minus_one_to_slot_zero(op: Any, args: Any) -> Any:
    """Tokens of no slot are written to the first one."""
    return _with_slots(args, args.plan.slots.clamp(min=0))


def _minus_one_to_the_last_slot(op: Any, args: Any) -> Any:
    """A negative slot counts from the end, as an index in Python does."""
    plane = args.cache[0]
    num_slots = plane.shape[0] * plane.shape[1]
    return _with_slots(args, torch.where(args.plan.slots < 0, num_slots + args.plan.slots, args.plan.slots))


def _key_and_value_exchanged(op: KvWriteOp, args: KvWriteArgs) -> KvWriteArgs:
    if args.value is None or args.value.shape != args.key.shape:
        return args
    return dataclasses.replace(args, key=args.value, value=args.key)


def _rows_one_behind_the_other(op: KvWriteOp, args: KvWriteArgs) -> KvWriteArgs:
    """Keys are read as if the rows of heads lay without gaps."""

    def dense(x: Tensor | None) -> Tensor | None:
        if x is None or x.is_contiguous():
            return x
        _, heads, dim = x.shape
        return torch.as_strided(x, x.shape, (heads * dim, dim, 1), x.storage_offset())

    return dataclasses.replace(args, key=dense(args.key), value=dense(args.value))  # type: ignore[arg-type]


def _last_token_left_out(op: KvWriteOp, args: KvWriteArgs) -> KvWriteArgs:
    """An odd number of tokens loses its last one: two are written at a time."""
    slots = args.plan.slots.clone()
    if len(slots) % 2 and len(slots) > 1:
        slots[-1] = -1
    return _with_slots(args, slots)  # type: ignore[no-any-return]


def _rest_of_the_block_cleared(op: KvWriteOp, args: KvWriteArgs, result: None) -> None:
    """A token's neighbours behind it in the block become zeros."""
    size = args.cache[0].shape[1]
    for slot in args.plan.slots.tolist():
        if slot >= 0 and slot + 1 not in args.plan.slots:
            for plane in args.cache:
                plane[slot // size, slot % size + 1 :] = 0


def _single_token_only_with_slot_below_a_block(op: KvWriteOp, args: KvWriteArgs) -> KvWriteArgs:
    """The path for one token drops the block and keeps the offset."""
    if len(args.plan.slots) != 1:
        return args
    return _with_slots(args, args.plan.slots % args.cache[0].shape[1])  # type: ignore[no-any-return]


def _scales_forgotten(op: Any, args: Any) -> Any:
    return dataclasses.replace(args, k_scale=None, v_scale=None)


def _value_takes_the_scale_of_the_key(op: Any, args: Any) -> Any:
    return dataclasses.replace(args, v_scale=args.k_scale)


def _one_scale_for_all_heads(op: Any, args: Any) -> Any:
    def first(scale: Tensor | None) -> Tensor | None:
        return None if scale is None else scale[:1]

    return dataclasses.replace(args, k_scale=first(args.k_scale), v_scale=first(args.v_scale))


def _half_where_none(op: AttentionOp, args: AttentionArgs) -> AttentionArgs:
    """An 8-bit cache without scales is read with a scale of its own."""
    if op.kv_dtype is op.dtype or args.k_scale is not None or args.cache is None:
        return args
    return dataclasses.replace(args, v_scale=torch.tensor([0.5]))


# -- the coarse write --------------------------------------------------------------------------------------------------


def _parts(op: QkNormRopeWriteOp) -> tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]:
    """Norm, rope and cache write of the reference."""
    norm = RmsNormOp(dtype=op.dtype, dim=op.head_dim, eps=op.eps, weight_offset=op.weight_offset)
    rope = RopeOp(
        dtype=op.dtype,
        num_heads=op.num_heads,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        rotary_dim=op.rotary_dim,
        interleaved=op.interleaved,
    )
    write = KvWriteOp(
        dtype=op.dtype,
        num_kv_heads=op.num_kv_heads,
        head_dim=op.head_dim,
        v_head_dim=op.v_head_dim,
        kv_dtype=op.kv_dtype,
    )
    return oracle(norm), oracle(rope), oracle(write)


def _coarse_write(rope_first: bool, stores_rotated: bool) -> Callable[[QkNormRopeWriteOp], Callable[[Any], Any]]:
    """The three parts in another order, or with another key stored than the one that is returned."""

    def make(op: QkNormRopeWriteOp) -> Callable[[Any], Any]:
        norm, rope, write = _parts(op)

        def normed(args: QkNormRopeWriteArgs, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            if args.q_weight is None or args.k_weight is None:
                return query, key
            return norm(RmsNormArgs(x=query, weight=args.q_weight)), norm(RmsNormArgs(x=key, weight=args.k_weight))

        def turned(args: QkNormRopeWriteArgs, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            out: tuple[Tensor, Tensor] = rope(
                RopeArgs(query=query, key=key, positions=args.positions, cos_sin=args.cos_sin)
            )
            return out

        def run(args: QkNormRopeWriteArgs) -> tuple[Tensor, Tensor]:
            pair = (args.query, args.key)
            steps = (turned, normed) if rope_first else (normed, turned)
            before_last = steps[0](args, *pair)
            last = steps[1](args, *before_last)
            stored = last[1] if stores_rotated else before_last[1]
            write(KvWriteArgs(key=stored, value=args.value, cache=args.cache, plan=args.plan))
            return last

        return run

    return make


# -- blocks ------------------------------------------------------------------------------------------------------------


def _ids_sorted(op: Any, args: ImportBlocksArgs) -> ImportBlocksArgs:
    return dataclasses.replace(args, block_ids=args.block_ids.sort().values)


def _first_plane_only(op: Any, args: ImportBlocksArgs) -> ImportBlocksArgs:
    return dataclasses.replace(args, cache=args.cache[:1], planes=args.planes[:1])


MUTANTS: tuple[Mutant, ...] = (
    kernel_bug("-1 slot written to slot 0", "kv_write", {"kv_write": before(minus_one_to_slot_zero)}),
    kernel_bug("-1 slot written to the last slot", "kv_write", {"kv_write": before(_minus_one_to_the_last_slot)}),
    kernel_bug("key and value exchanged", "kv_write", {"kv_write": before(_key_and_value_exchanged)}),
    kernel_bug("key read without its stride", "kv_write/strided", {"kv_write": before(_rows_one_behind_the_other)}),
    kernel_bug("last of an odd number of tokens not written", "attention", {"kv_write": before(_last_token_left_out)}),
    kernel_bug("rest of the block cleared", "kv_write", {"kv_write": after(_rest_of_the_block_cleared)}),
    kernel_bug(
        "one token goes to its offset in block 0",
        "kv_write/decode",
        {"kv_write": before(_single_token_only_with_slot_below_a_block)},
    ),
    kernel_bug("scales forgotten when storing", "attention/kv8", {"kv_write": before(_scales_forgotten)}),
    kernel_bug("scales forgotten when reading", "attention/kv8", {"attention": before(_scales_forgotten)}),
    kernel_bug("value scaled as the key", "attention/kv8", {"attention": before(_value_takes_the_scale_of_the_key)}),
    kernel_bug("one scale for all heads", "attention/kv8", {"attention": before(_one_scale_for_all_heads)}),
    kernel_bug("eight bits without scales halved", "attention/kv8-plain", {"attention": before(_half_where_none)}),
    kernel_bug("unrotated key stored", "qk_norm_rope_write", {"qk_norm_rope_write": _coarse_write(False, False)}),
    kernel_bug("rope before the norm", "qk_norm_rope_write/qk-norm", {"qk_norm_rope_write": _coarse_write(True, True)}),
    kernel_bug(
        "coarse write fills slot 0", "qk_norm_rope_write", {"qk_norm_rope_write": before(minus_one_to_slot_zero)}
    ),
    kernel_bug("blocks imported in order of their ids", "import_blocks", {"import_blocks": before(_ids_sorted)}),
    kernel_bug("values of imported blocks forgotten", "import_blocks", {"import_blocks": before(_first_plane_only)}),
)
