"""Reference of the operations that turn logits into tokens and move the decode state on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from core.backend.ops.dense import (
    AdvanceArgs,
    AdvanceOp,
    ApplyTokenBitmaskArgs,
    ApplyTokenBitmaskOp,
    RejectionSampleArgs,
    RejectionSampleOp,
    SampleArgs,
    SampleOp,
)
from core.backend.philox import ACCEPT_STREAM, GUMBEL_STREAM, RECOVER_STREAM, gumbel, uniform
from core.backend.reference.precision import alone
from core.backend.reference.registry import composite

__all__ = ["draw", "kept", "tempered"]

_MIN_TEMPERATURE = 1e-5

Record = TypeVar("Record", SampleArgs, RejectionSampleArgs)


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits / max(temperature, 1e-5), float32; temperature has the leading dims of logits."""
    return logits.float() / temperature.float().clamp(min=_MIN_TEMPERATURE).unsqueeze(-1)


def kept(z: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Which tokens may be drawn, [R, vocab_size], bool, as `SampleOp` defines it."""
    falling, order = z.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[-1], device=z.device)
    keep = torch.ones_like(z, dtype=torch.bool)
    if top_k is not None:
        keep = (rank < top_k.unsqueeze(-1)) | (top_k.unsqueeze(-1) <= 0)
    probs = torch.where(keep, falling, -torch.inf).softmax(-1)
    if top_p is not None:
        limit = top_p.unsqueeze(-1)
        before = torch.nn.functional.pad(probs.cumsum(-1)[:, :-1], (1, 0))
        keep = keep & ((before < limit) | (limit >= 1) | (rank == 0))
    if min_p is not None:
        keep = keep & (probs >= min_p.unsqueeze(-1) * probs[:, :1])
    return torch.zeros_like(keep).scatter(-1, order, keep)


def draw(scores: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """argmax of scores + Gumbel noise for each row, [R], int64; scores are logits up to a constant."""
    rows, ids = torch.where(scores > -torch.inf)
    noise = gumbel(seeds[rows], positions[rows].long(), ids, stream)
    return scores.index_put((rows, ids), scores[rows, ids] + noise).argmax(-1)


@composite("sample")
def make_sample(op: SampleOp) -> Callable[[SampleArgs], Tensor]:
    """One token a row by the Gumbel trick; the most likely one where the temperature is 0."""
    filtered = bool(op.features & {"top_k", "top_p", "min_p"})
    separate = alone(op)

    def sample(args: SampleArgs) -> Tensor:
        if separate and len(args.logits) > 1:
            return torch.cat([sample(row) for row in _rows(args)])
        greedy = args.logits.argmax(-1)
        if not args.temperature.any():
            return greedy.to(torch.int32)
        z = tempered(args.logits, args.temperature)
        if filtered:
            z = torch.where(kept(z, args.top_k, args.top_p, args.min_p), z, -torch.inf)
        drawn = draw(z, args.seeds, args.positions, GUMBEL_STREAM)
        return torch.where(args.temperature > 0, drawn, greedy).to(torch.int32)

    return sample


def _rows(args: Record) -> Iterator[Record]:
    """A record of each row of a record in which every tensor has rows."""
    tensors = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if getattr(args, f.name) is not None}
    for row in range(len(args.logits)):
        yield dataclasses.replace(args, **{name: x[row : row + 1].clone() for name, x in tensors.items()})


@composite("apply_token_bitmask")
def make_apply_token_bitmask(op: ApplyTokenBitmaskOp) -> Callable[[ApplyTokenBitmaskArgs], None]:
    """-inf where the token's bit is 0."""

    def apply_token_bitmask(args: ApplyTokenBitmaskArgs) -> None:
        ids = torch.arange(op.vocab_size, device=args.logits.device)
        allowed = (args.bitmask[:, ids // 32] >> (ids % 32)) & 1
        args.logits[:, : op.vocab_size].masked_fill_(allowed == 0, -torch.inf)

    return apply_token_bitmask


@composite("rejection_sample")
def make_rejection_sample(op: RejectionSampleOp) -> Callable[[RejectionSampleArgs], tuple[Tensor, Tensor]]:
    """The accepted head of each draft and one more token."""
    steps, separate = op.num_spec_tokens, alone(op)

    def rejection_sample(args: RejectionSampleArgs) -> tuple[Tensor, Tensor]:
        if separate and len(args.logits) > 1:
            pairs = [rejection_sample(row) for row in _rows(args)]
            return torch.cat([ids for ids, _ in pairs]), torch.cat([count for _, count in pairs])
        accepted = _accepted(args, steps)
        last = _last_token(args, accepted)
        column = torch.arange(steps + 1, device=accepted.device)
        drafts = torch.nn.functional.pad(args.draft_token_ids, (0, 1), value=-1)
        tokens = torch.where(column < accepted[:, None], drafts, -1)
        tokens = torch.where(column == accepted[:, None], last[:, None].to(tokens.dtype), tokens)
        return tokens.to(torch.int32), (accepted + 1).to(torch.int32)

    return rejection_sample


def _accepted(args: RejectionSampleArgs, steps: int) -> Tensor:
    """Draft tokens that stay, [R], int64: up to the first that is refused."""
    logits = args.logits[:, :steps]
    drafts = args.draft_token_ids.long().clamp(min=0)
    column = torch.arange(steps, device=logits.device)
    p = _pick(tempered(logits, args.temperature[:, None].expand(-1, steps)).softmax(-1), drafts)
    q = torch.ones_like(p) if args.draft_probs is None else _pick(args.draft_probs.float(), drafts)
    u = uniform(args.seeds[:, None], args.positions[:, None].long() + column, drafts, ACCEPT_STREAM)
    stays = torch.where(args.temperature[:, None] > 0, u * q < p, drafts == logits.argmax(-1))
    stays = stays & (column < args.num_draft_tokens[:, None])
    return stays.long().cumprod(-1).sum(-1)


def _pick(table: Tensor, index: Tensor) -> Tensor:
    return table.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _last_token(args: RejectionSampleArgs, accepted: Tensor) -> Tensor:
    """The token after the accepted ones, [R]: of the remainder after a refusal, of the target otherwise."""
    rows = torch.arange(len(accepted), device=accepted.device)
    logits = args.logits[rows, accepted]
    z, positions = tempered(logits, args.temperature), args.positions + accepted
    fresh = draw(z, args.seeds, positions, GUMBEL_STREAM)
    recovered = draw(_remainder(args, z, accepted).log(), args.seeds, positions, RECOVER_STREAM)
    drawn = torch.where(accepted < args.num_draft_tokens, recovered, fresh)
    return torch.where(args.temperature > 0, drawn, logits.argmax(-1))


def _remainder(args: RejectionSampleArgs, z: Tensor, accepted: Tensor) -> Tensor:
    """max(p - q, 0) at the first refused draft token, [R, vocab_size]; p itself where rounding left nothing."""
    p = z.softmax(-1)
    if not args.draft_token_ids.shape[1]:
        return p
    refused = accepted.clamp(max=args.draft_token_ids.shape[1] - 1)
    if args.draft_probs is None:
        token = args.draft_token_ids.long().clamp(min=0).gather(1, refused[:, None])
        rest = p.scatter(1, token, 0.0)
    else:
        rows = torch.arange(len(refused), device=refused.device)
        rest = (p - args.draft_probs[rows, refused].float()).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


@composite("advance")
def make_advance(op: AdvanceOp) -> Callable[[AdvanceArgs], None]:
    """Next ids, positions, lengths and slots, in place; a position without a real block gets slot -1."""

    def advance(args: AdvanceArgs) -> None:
        moved = args.num_accepted > 0
        last = (args.num_accepted.long() - 1).clamp(min=0)
        token = args.sampled.gather(1, last[:, None])[:, 0]
        args.token_ids.copy_(torch.where(moved, token, args.token_ids))
        args.positions.add_(args.num_accepted)
        args.seq_lens.add_(args.num_accepted)
        for table, slots, size in zip(args.block_tables, args.slots, op.block_sizes, strict=True):
            slots.copy_(torch.where(moved, _slots(table, args.positions, size), slots))

    return advance


def _slots(table: Tensor, positions: Tensor, size: int) -> Tensor:
    column = (positions // size).long()
    block = table.gather(1, column.clamp(max=table.shape[1] - 1)[:, None])[:, 0]
    real = (block != 0) & (column < table.shape[1])
    return torch.where(real, block * size + positions % size, -1)
