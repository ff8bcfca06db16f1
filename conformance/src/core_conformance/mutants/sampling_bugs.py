"""From logits to tokens with one bug each: filters, draws, masks, and the decode state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from core.backend.ops import (
    AdvanceArgs,
    AdvanceOp,
    ApplyTokenBitmaskArgs,
    ApplyTokenBitmaskOp,
    SampleArgs,
    SampleOp,
)
from core.backend.philox import GUMBEL_STREAM
from core.backend.reference.sampling import draw, kept, tempered
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.planting import after, before
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS"]

Keep = Callable[[SampleArgs, Tensor], Tensor]
"""(record, tempered logits) -> which tokens may be drawn."""


def _sample(keep: Keep, stream: int = GUMBEL_STREAM) -> Maker:
    """Sampling that filters in its own way."""

    def make(op: SampleOp) -> Callable[[SampleArgs], Tensor]:
        def sample(args: SampleArgs) -> Tensor:
            greedy = args.logits.argmax(-1)
            z = tempered(args.logits, args.temperature)
            drawn = draw(torch.where(keep(args, z), z, -torch.inf), args.seeds, args.positions, stream)
            return torch.where(args.temperature > 0, drawn, greedy).to(torch.int32)

        return sample

    return make


def _rightly(args: SampleArgs, z: Tensor) -> Tensor:
    return kept(z, args.top_k, args.top_p, args.min_p)


def _one_more_by_rank(args: SampleArgs, z: Tensor) -> Tensor:
    top_k = None if args.top_k is None else torch.where(args.top_k > 0, args.top_k + 1, 0)
    return kept(z, top_k, args.top_p, args.min_p)


def _zero_keeps_one(args: SampleArgs, z: Tensor) -> Tensor:
    return kept(z, None if args.top_k is None else args.top_k.clamp(min=1), args.top_p, args.min_p)


def _head_stays_below_top_p(args: SampleArgs, z: Tensor) -> Tensor:
    """The token with which the sum reaches top_p is left out."""
    keep = kept(z, args.top_k, None, None)
    if args.top_p is not None:
        falling, order = torch.where(keep, z, -torch.inf).sort(dim=-1, descending=True, stable=True)
        sums = falling.softmax(-1).cumsum(-1)
        inside = (sums < args.top_p[:, None]) | (torch.arange(z.shape[1]) == 0) | (args.top_p[:, None] >= 1)
        keep = keep & torch.zeros_like(keep).scatter(-1, order, inside)
    return keep & kept(z, args.top_k, args.top_p, args.min_p)


def _top_p_of_all(args: SampleArgs, z: Tensor) -> Tensor:
    """top_p counts the probabilities of every token, and not of the top_k alone."""
    return kept(z, args.top_k, None, args.min_p) & kept(z, None, args.top_p, None)


def _min_p_of_one(args: SampleArgs, z: Tensor) -> Tensor:
    """min_p is compared with the probability itself."""
    keep = kept(z, args.top_k, args.top_p, None)
    if args.min_p is None:
        return keep
    probs = z.softmax(-1)
    return keep & ((probs >= args.min_p[:, None]) | (probs == probs.amax(-1, keepdim=True)))


def _filters_before_temperature(args: SampleArgs, z: Tensor) -> Tensor:
    return kept(args.logits.float(), args.top_k, args.top_p, args.min_p)


def _last_of_equals(op: SampleOp, args: SampleArgs, out: Tensor) -> Tensor:
    last = args.logits.shape[1] - 1 - args.logits.flip(-1).argmax(-1)
    return torch.where(args.temperature > 0, out, last.to(out.dtype))


def _one_seed(op: SampleOp, args: SampleArgs) -> SampleArgs:
    return dataclasses.replace(args, seeds=args.seeds[:1].expand_as(args.seeds))


def _low_word_of_the_seed(op: SampleOp, args: SampleArgs) -> SampleArgs:
    return dataclasses.replace(args, seeds=args.seeds & 0xFFFFFFFF)


def _no_position(op: SampleOp, args: SampleArgs) -> SampleArgs:
    return dataclasses.replace(args, positions=torch.zeros_like(args.positions))


def _first_temperature(op: SampleOp, args: SampleArgs) -> SampleArgs:
    return dataclasses.replace(args, temperature=args.temperature[:1].expand_as(args.temperature))


def _tiles_of_4096(op: SampleOp) -> Callable[[SampleArgs], Tensor]:
    """Token ids in the random numbers start anew in each tile of the vocabulary."""
    honest = oracle(op)

    def sample(args: SampleArgs) -> Tensor:
        if op.vocab_size <= 4096 or op.features:
            out: Tensor = honest(args)
            return out
        z = tempered(args.logits, args.temperature)
        parts = [draw(part, args.seeds, args.positions, GUMBEL_STREAM) for part in z.split(4096, dim=1)]
        ids = torch.stack([4096 * tile + part for tile, part in enumerate(parts)], dim=1)
        best = z.gather(1, ids).argmax(-1)
        return ids.gather(1, best[:, None])[:, 0].to(torch.int32)

    return sample


# -- masks -------------------------------------------------------------------------------------------------------------


def _bits_from_the_top(op: ApplyTokenBitmaskOp) -> Callable[[ApplyTokenBitmaskArgs], None]:
    def apply_token_bitmask(args: ApplyTokenBitmaskArgs) -> None:
        ids = torch.arange(op.vocab_size)
        allowed = (args.bitmask[:, ids // 32] >> (31 - ids % 32)) & 1
        args.logits[:, : op.vocab_size].masked_fill_(allowed == 0, -torch.inf)

    return apply_token_bitmask


def _whole_words_only(op: ApplyTokenBitmaskOp) -> Callable[[ApplyTokenBitmaskArgs], None]:
    """Tokens in a last word that is not full are always allowed."""
    honest = oracle(op)

    def apply_token_bitmask(args: ApplyTokenBitmaskArgs) -> None:
        tail = args.logits[:, op.vocab_size // 32 * 32 :].clone()
        honest(args)
        args.logits[:, op.vocab_size // 32 * 32 :] = tail

    return apply_token_bitmask


def _masked_in_a_copy(op: ApplyTokenBitmaskOp, args: ApplyTokenBitmaskArgs) -> ApplyTokenBitmaskArgs:
    return dataclasses.replace(args, logits=args.logits.clone())


# -- the decode state --------------------------------------------------------------------------------------------------


def _last_column(op: AdvanceOp, args: AdvanceArgs, result: None) -> None:
    """The next input is the last of the sampled columns, accepted or not."""
    args.token_ids.copy_(torch.where(args.num_accepted > 0, args.sampled[:, -1], args.token_ids))


def _one_block_size(op: AdvanceOp) -> Callable[[AdvanceArgs], None]:
    size = op.block_sizes[0]
    return oracle(dataclasses.replace(op, block_sizes=(size,) * len(op.block_sizes)))


def _positions_by_one(op: AdvanceOp, args: AdvanceArgs) -> AdvanceArgs:
    return dataclasses.replace(args, num_accepted=args.num_accepted.clamp(max=1))


def _null_block_is_a_block(op: AdvanceOp, args: AdvanceArgs, result: None) -> None:
    """A position without a block gets a slot of block 0."""
    for slots, size in zip(args.slots, op.block_sizes, strict=True):
        slots.copy_(torch.where(slots == -1, args.positions % size, slots))


def _drawn(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"sample/{first}", {"sample": maker})


def _masked(name: str, maker: Maker) -> Mutant:
    return kernel_bug(name, "apply_token_bitmask", {"apply_token_bitmask": maker})


def _advanced(name: str, maker: Maker) -> Mutant:
    return kernel_bug(name, "advance", {"advance": maker})


MUTANTS: tuple[Mutant, ...] = (
    _drawn("last of equals", "greedy", after(_last_of_equals)),
    _drawn("seed shared between rows", "draws", before(_one_seed)),
    _drawn("low word of the seed", "draws", before(_low_word_of_the_seed)),
    _drawn("position not in the random numbers", "draws", before(_no_position)),
    _drawn("stream of refused drafts", "draws", _sample(_rightly, stream=2)),
    _drawn("random numbers of a tile", "draws-vocab-5003", _tiles_of_4096),
    _drawn("one more than top_k", "filtered-top_k", _sample(_one_more_by_rank)),
    _drawn("top_k 0 keeps one", "neutral", _sample(_zero_keeps_one)),
    _drawn("top_p without the token that reaches it", "filtered-top_p", _sample(_head_stays_below_top_p)),
    _drawn("top_p of all tokens", "filtered-all", _sample(_top_p_of_all)),
    _drawn("min_p as a probability", "filtered-min_p", _sample(_min_p_of_one)),
    _drawn("filters before the temperature", "filtered", _sample(_filters_before_temperature)),
    _drawn("temperature of the first row", "mixed", before(_first_temperature)),
    _masked("mask bits from the top", _bits_from_the_top),
    _masked("last mask word ignored", _whole_words_only),
    _masked("masked in a copy", before(_masked_in_a_copy)),
    _advanced("last column is the next input", after(_last_column)),
    _advanced("slots of the first group's block size", _one_block_size),
    _advanced("moves on by one", before(_positions_by_one)),
    _advanced("slot in the null block", after(_null_block_is_a_block)),
)
