"""Adapters, moved and exported tokens, and verified drafts, with one bug each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import (
    ExportBlocksArgs,
    LoraAddArgs,
    LoraAddOp,
    MoveTokensArgs,
    RejectionSampleArgs,
    RejectionSampleOp,
)
from core.backend.philox import GUMBEL_STREAM
from core.backend.reference.sampling import draw, tempered
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.planting import after, before
from core_conformance.mutants.variant import Mutant, kernel_bug
from core_conformance.subject import oracle

__all__ = ["MUTANTS"]


# -- tokens and blocks -------------------------------------------------------------------------------------------------


def _writes_before_reads(op: Any) -> Callable[[MoveTokensArgs], None]:
    """Pair by pair, so that a slot which was a target already is read anew."""
    honest = oracle(op)

    def move_tokens(args: MoveTokensArgs) -> None:
        for pair in range(len(args.source_slots)):
            one = slice(pair, pair + 1)
            honest(dataclasses.replace(args, source_slots=args.source_slots[one], target_slots=args.target_slots[one]))

    return move_tokens


def _skipped_pair_clears(op: Any, args: MoveTokensArgs, result: None) -> None:
    """A pair with source -1 fills its target with zeros."""
    cleared = args.target_slots[args.source_slots < 0].long()
    for plane in args.cache:
        flat = plane.view(torch.uint8).flatten(0, 1)
        flat[cleared[cleared >= 0]] = 0


def _first_plane_moved(op: Any, args: MoveTokensArgs) -> MoveTokensArgs:
    return dataclasses.replace(args, cache=args.cache[:1])


def _exported_in_order_of_ids(op: Any, args: ExportBlocksArgs) -> ExportBlocksArgs:
    return dataclasses.replace(args, block_ids=args.block_ids.sort().values)


def _value_for_key(op: Any, args: ExportBlocksArgs, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(reversed(out)) if len({plane.shape for plane in out}) == 1 else out


# -- adapters ----------------------------------------------------------------------------------------------------------


def _none_is_the_last_adapter(op: LoraAddOp, args: LoraAddArgs) -> LoraAddArgs:
    return dataclasses.replace(
        args, adapter_ids=torch.where(args.adapter_ids < 0, op.num_adapters - 1, args.adapter_ids)
    )


def _adapter_of_the_first_token(op: LoraAddOp, args: LoraAddArgs) -> LoraAddArgs:
    return dataclasses.replace(args, adapter_ids=args.adapter_ids[:1].expand_as(args.adapter_ids))


def _sum_in_a_copy(op: LoraAddOp, args: LoraAddArgs) -> LoraAddArgs:
    return dataclasses.replace(args, y=args.y.clone())


def _inner_in_half(op: LoraAddOp) -> Callable[[LoraAddArgs], None]:
    """a x is rounded to an 8-bit float on its way."""

    def lora_add_(args: LoraAddArgs) -> None:
        for row, adapter in enumerate(args.adapter_ids.tolist()):
            if adapter >= 0:
                inner = args.a[adapter].float() @ args.x[row].float()
                inner = inner.to(torch.float8_e5m2).float()
                args.y[row] = (args.y[row].float() + args.b[adapter].float() @ inner).to(args.y.dtype)

    return lora_add_


# -- drafts ------------------------------------------------------------------------------------------------------------


def _one_past_the_refusal(op: RejectionSampleOp, args: RejectionSampleArgs, out: Any) -> Any:
    """The draft behind the accepted ones stays as well, and what was drawn in its place follows."""
    tokens, count = out[0].clone(), out[1].clone()
    for row in range(len(tokens)):
        accepted = int(count[row]) - 1
        if accepted < int(args.num_draft_tokens[row]):
            tokens[row, accepted + 1] = tokens[row, accepted]
            tokens[row, accepted] = args.draft_token_ids[row, accepted]
            count[row] += 1
    return tokens, count


def _nothing_after_the_last_draft(op: RejectionSampleOp, args: RejectionSampleArgs, out: Any) -> Any:
    """Where every draft stays no further token is drawn."""
    tokens, count = out[0].clone(), out[1].clone()
    for row in range(len(tokens)):
        drafts = int(args.num_draft_tokens[row])
        if drafts and int(count[row]) == drafts + 1:
            tokens[row, drafts], count[row] = -1, drafts
    return tokens, count


def _drawn_from_p(op: RejectionSampleOp, args: RejectionSampleArgs, out: Any) -> Any:
    """After a refusal the token is drawn from the target itself."""
    tokens, count = out[0].clone(), out[1]
    rows = torch.arange(len(tokens))
    last = (count - 1).long()
    logits = args.logits[rows, last]
    drawn = draw(tempered(logits, args.temperature), args.seeds, args.positions + last, GUMBEL_STREAM)
    fresh = torch.where(args.temperature > 0, drawn, logits.argmax(-1))
    tokens[rows, last] = fresh.to(tokens.dtype)
    return tokens, count


def _drafter_always_sure(op: RejectionSampleOp, args: RejectionSampleArgs) -> RejectionSampleArgs:
    return dataclasses.replace(args, draft_probs=None)


def _position_of_the_first_draft(op: RejectionSampleOp, args: RejectionSampleArgs, out: Any) -> Any:
    """All draws of a request take the random numbers of its first position."""
    tokens, count = out[0].clone(), out[1]
    rows, last = torch.arange(len(tokens)), (count - 1).long()
    whole = (last == args.num_draft_tokens) & (args.temperature > 0)
    logits = args.logits[rows, last].nan_to_num()
    drawn = draw(tempered(logits, args.temperature), args.seeds, args.positions, GUMBEL_STREAM)
    tokens[rows, last] = torch.where(whole, drawn.to(tokens.dtype), tokens[rows, last])
    return tokens, count


def _most_likely_without_drafts(op: RejectionSampleOp, args: RejectionSampleArgs, out: Any) -> Any:
    """A request without drafts is not drawn for."""
    tokens = out[0].clone()
    bare = args.num_draft_tokens == 0
    tokens[:, 0] = torch.where(bare, args.logits[:, 0].argmax(-1).to(tokens.dtype), tokens[:, 0])
    return tokens, out[1]


def _greedy_draws(op: RejectionSampleOp, args: RejectionSampleArgs) -> RejectionSampleArgs:
    """Temperature 0 is taken for 1."""
    return dataclasses.replace(args, temperature=torch.where(args.temperature > 0, args.temperature, 1.0))


def _drafts(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"rejection_sample{first}", {"rejection_sample": maker})


def _moved(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"move_tokens{first}", {"move_tokens": maker})


def _adapter(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"lora_add_{first}", {"lora_add_": maker})


MUTANTS: tuple[Mutant, ...] = (
    _moved("moved tokens read what was just written", "/", _writes_before_reads),
    _moved("skipped pair clears its target", "/none", after(_skipped_pair_clears)),
    _moved("keys moved and values not", "/", before(_first_plane_moved)),
    kernel_bug(
        "blocks exported in order of their ids", "export_blocks", {"export_blocks": before(_exported_in_order_of_ids)}
    ),
    kernel_bug("values exported for keys", "export_blocks", {"export_blocks": after(_value_for_key)}),
    _adapter("no adapter taken for the last one", "/", before(_none_is_the_last_adapter)),
    _adapter("adapter of the first token for all", "/which", before(_adapter_of_the_first_token)),
    _adapter("adapters added to a copy", "/", before(_sum_in_a_copy)),
    _adapter("inner product in eight bits", "/", _inner_in_half),
    _drafts("draft accepted past the refusal", "/", after(_one_past_the_refusal)),
    _drafts("nothing drawn after the last draft", "/", after(_nothing_after_the_last_draft)),
    _drafts("drawn from the target after a refusal", "/", after(_drawn_from_p)),
    _drafts("drafter taken for certain", "/probabilities", before(_drafter_always_sure)),
    _drafts("position of the first draft for all", "/", after(_position_of_the_first_draft)),
    _drafts("without drafts the most likely token", "/no-drafts", after(_most_likely_without_drafts)),
    _drafts("greedy drafts verified by chance", "/greedy", before(_greedy_draws)),
)
