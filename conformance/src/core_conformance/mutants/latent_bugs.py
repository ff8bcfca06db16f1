"""Latent attention, the choice of what it reads, and what comes before it, with one bug each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.backend.ops import IndexTopkArgs, IndexTopkOp, MlaArgs, MlaOp, RopeArgs
from core.backend.reference.cache import owned_keys, spans
from core_conformance.mutants.attention_bugs import blocks_by_number, padding_untouched
from core_conformance.mutants.backend import Maker
from core_conformance.mutants.cache_bugs import minus_one_to_slot_zero
from core_conformance.mutants.planting import after, before, changed_op, changed_part
from core_conformance.mutants.variant import Mutant, kernel_bug

__all__ = ["MUTANTS"]


def _no_rotated_part(op: MlaOp, args: MlaArgs) -> MlaArgs:
    return dataclasses.replace(args, q_rope=torch.zeros_like(args.q_rope))


def _one_position_too_early(op: MlaOp, args: MlaArgs) -> MlaArgs:
    """Queries behind a past stand one position before their own, and miss the newest key."""
    starts = args.plan.batch.query_start_loc_host
    lens = [max(length - 1, starts[row + 1] - starts[row]) for row, length in enumerate(args.plan.group.seq_lens_host)]
    group = dataclasses.replace(args.plan.group, seq_lens_host=lens, seq_lens=torch.tensor(lens, dtype=torch.int32))
    return dataclasses.replace(args, plan=dataclasses.replace(args.plan, group=group))


def _none_is_position_zero(op: MlaOp, args: MlaArgs) -> MlaArgs:
    return args if args.indices is None else dataclasses.replace(args, indices=args.indices.clamp(min=0))


def _everything_chosen(op: MlaOp, args: MlaArgs) -> MlaArgs:
    return dataclasses.replace(args, indices=None)


def _lse_in_base_2(op: MlaOp, args: MlaArgs, out: Tensor) -> Tensor:
    if args.lse is not None:
        args.lse.div_(math.log(2.0))
    return out


# -- the choice of positions -------------------------------------------------------------------------------------------


def _index(*, relu: bool = True, ascending_ties: bool = True, weighted: bool = True, more_keys: int = 0) -> Maker:
    """index_topk written anew; honest with the defaults."""

    def make(op: IndexTopkOp) -> Callable[[IndexTopkArgs], Tensor]:
        def index_topk(args: IndexTopkArgs) -> Tensor:
            out = torch.full((len(args.query), op.top_k), -1, dtype=torch.int32)
            for span in spans(args.plan):
                keys, _ = owned_keys(args.cache[0], args.plan, span)
                for token in range(span.start, span.end):
                    seen = min(span.first_position + token - span.start + 1 + more_keys, span.seq_len)
                    products = args.query[token].float() @ keys[:seen].flatten(1).float().T
                    products = products.relu() if relu else products
                    scores = args.weights[token] @ products if weighted else products.sum(0)
                    found = _falling(scores, ascending_ties)[: op.top_k]
                    out[token, : len(found)] = found.to(torch.int32)
            return out

        return index_topk

    return make


def _falling(scores: Tensor, ascending_ties: bool) -> Tensor:
    if ascending_ties:
        return scores.sort(descending=True, stable=True).indices
    return len(scores) - 1 - scores.flip(0).sort(descending=True, stable=True).indices


def _sorted_by_position(op: IndexTopkOp, args: IndexTopkArgs, out: Tensor) -> Tensor:
    far = torch.iinfo(torch.int32).max
    rising = torch.where(out < 0, far, out).sort(-1).values
    return torch.where(rising == far, -1, rising)


def _nothing_is_position_zero(op: IndexTopkOp, args: IndexTopkArgs, out: Tensor) -> Tensor:
    return out.clamp(min=0)


# -- what comes before -------------------------------------------------------------------------------------------------


def _query_alone(spec: Any, honest: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The rotated part of the key stays as it is."""

    def rope(args: RopeArgs) -> tuple[Tensor, Tensor]:
        return honest(args)[0], args.key

    return rope


def _mla(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"mla{first}", {"mla": maker})


def _chosen(name: str, first: str, maker: Maker) -> Mutant:
    return kernel_bug(name, f"index_topk{first}", {"index_topk": maker})


def _prolog(name: str, maker: Maker) -> Mutant:
    return kernel_bug(name, "mla_prolog", {"mla_prolog": maker})


MUTANTS: tuple[Mutant, ...] = (
    _mla("rotated part of the query dropped", "/rope-part", before(_no_rotated_part)),
    _mla("latent scale 1.01", "/", changed_op(scale=lambda op: op.scale * 1.01)),
    _mla("newest latent missed", "/counting", before(_one_position_too_early)),
    _mla("-1 chooses position 0", "/sparse", before(_none_is_position_zero)),
    _mla("choice ignored", "/sparse", before(_everything_chosen)),
    _mla("latent lse in base 2", "/lse", after(_lse_in_base_2)),
    _mla("latent blocks in order of their ids", "/permuted", before(blocks_by_number)),
    _mla("latent padding left as it was", "/padding", after(padding_untouched)),
    _chosen("ties go to the higher position", "/ties", _index(ascending_ties=False)),
    _chosen("negative products count", "/", _index(relu=False)),
    _chosen("index weights ignored", "/", _index(weighted=False)),
    _chosen("one position past the query", "/", _index(more_keys=1)),
    _chosen("chosen positions in rising order", "/", after(_sorted_by_position)),
    _chosen("no position told as 0", "/wide", after(_nothing_is_position_zero)),
    _prolog("latent not normed", changed_part("kv_norm", lambda spec, honest: lambda args: args.x)),
    _prolog("rotated part of the key forgotten", changed_part("rope", _query_alone)),
    _prolog("latent pairs taken the other way", changed_op(interleaved=lambda op: not op.interleaved)),
    _prolog("latent row fills slot 0", before(minus_one_to_slot_zero)),
)
